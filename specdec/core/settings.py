"""The settings that services share, given by flag (``--kv-slots``) or environment (``SPECDEC_KV_SLOTS``).

A service adds its own fields in a subclass. All bad values are reported at once, at the start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsConfigDict, SettingsError

Settings = TypeVar("Settings", bound=BaseSettings)


class ServiceSettings(BaseSettings):
    """Settings of every service."""

    model_config = SettingsConfigDict(
        env_prefix="SPECDEC_",
        env_nested_delimiter="__",
        cli_kebab_case=True,
        extra="ignore",
        cli_implicit_flags=True,
        validate_default=True,
    )

    host: str = Field("127.0.0.1", description="address to listen on; IPv6 with or without brackets")
    port: int = Field(0, ge=0, le=65535, description="port to listen on; 0: any free port, printed at the start")
    health_port: int | None = Field(
        None, ge=0, le=65535, description="port for gRPC health alone, always in plain text (no TLS)"
    )
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="port of the metrics for Prometheus, at /metrics; 0: any free port; unset: none"
    )
    tls_cert: str = Field("", description="certificate chain in PEM; its subjectAltName has the service's name")
    tls_key: str = Field("", description="private key of tls_cert in PEM")
    tls_ca: str = Field(
        "", description="trusted certificates in PEM; with tls_cert and tls_key: mutual TLS; unset: plain text"
    )
    insecure: bool = Field(False, description="allow addresses other than loopback without TLS")
    reflection: bool = Field(False, description="serve gRPC reflection")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="lowest level logged")
    shutdown_grace_s: float = Field(10.0, ge=0, description="seconds for an orderly shutdown after SIGTERM")

    def address(self, port: int) -> str:
        """The address to listen on, as host:port."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

    @field_validator("log_level", mode="before")
    @classmethod
    def _in_any_case(cls, value: object) -> object:
        return value.upper() if isinstance(value, str) else value

    @field_validator("host")
    @classmethod
    def _without_brackets(cls, value: str) -> str:
        return value.strip("[]")

    @field_validator("tls_cert", "tls_key", "tls_ca")
    @classmethod
    def _is_there(cls, value: str) -> str:
        if value and not Path(value).is_file():
            raise ValueError(f"there is no file {value}")
        return value

    @field_validator("tls_ca")
    @classmethod
    def _together(cls, value: str, others: ValidationInfo) -> str:
        given = {"tls_ca": value, **{name: others.data.get(name, "bad") for name in ("tls_cert", "tls_key")}}
        missing = [name for name, file in given.items() if not file]
        if 0 < len(missing) < len(given):
            raise ValueError(f"tls_cert, tls_key and tls_ca go together; not set: {', '.join(sorted(missing))}")
        return value

    @field_validator("insecure")
    @classmethod
    def _loopback_unless_told(cls, value: bool, others: ValidationInfo) -> bool:
        host = others.data.get("host", "localhost")
        tls = others.data.get("tls_ca", "bad")
        if not (value or tls or _is_loopback(host)):
            raise ValueError(
                f"{host} can be reached from other machines, and without tls_cert, tls_key and tls_ca all of them can"
                " read and send requests: set these, or set insecure if the network is private"
            )
        return value


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_at_commas(value: object) -> object:
    """The parts of comma-separated values, in the environment as on the command line."""
    parts = [value] if isinstance(value, str) else value
    if isinstance(parts, list) and all(isinstance(part, str) for part in parts):
        return [address.strip() for part in parts for address in part.split(",") if address.strip()]
    return value


def checked_addresses(value: list[str]) -> list[str]:
    """``value``. Raises ValueError if one is not host:port."""
    for address in value:
        host, _, port = address.rpartition(":")
        if not host or " " in host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"{address!r} is not host:port")
    return value


class FrontSettings(ServiceSettings):
    """Settings of a service that may run as several processes."""

    processes: int = Field(1, ge=1, le=64, description="processes that listen on the port, each the whole service")
    shared_port: bool = Field(False, description="other processes may listen on the port as well (SO_REUSEPORT)")


class EngineSettings(ServiceSettings):
    """Settings of a service with an engine, with or without a model."""

    max_sequences: int = Field(1024, gt=0, description="maximum number of open sequences")
    hung_pass_s: float = Field(
        60.0,
        gt=0,
        description="seconds after which a running pass makes the service NOT_SERVING; after twice as many it exits",
    )


class VllmSettings(BaseModel):
    """Settings of engine vllm, by the names that vLLM gives them. What vLLM refuses is refused at the start."""

    model_config = ConfigDict(extra="forbid")

    tensor_parallel_size: int = Field(1, gt=0, description="GPUs that share each layer")
    distributed_executor_backend: Literal["mp", "ray"] | None = Field(
        None, description="mp: processes, on each of nnodes machines; ray: those of a Ray cluster"
    )
    nnodes: int = Field(1, gt=0, description="machines that share the model, each with a service of another node_rank")
    node_rank: int = Field(0, ge=0, description="0: serves; others: lend their GPUs to it, and end with it")
    master_addr: str = Field("127.0.0.1", description="host of node_rank 0, with nnodes over 1")
    master_port: int = Field(29501, gt=0, le=65535, description="port of node_rank 0 for the other nodes")
    quantization: str | None = Field(None, description="how weights are quantised; unset: as the checkpoint says")
    kv_cache_dtype: str = Field("auto", description="dtype of the KV cache, such as fp8")
    max_model_len: int | None = Field(None, gt=0, description="context length; unset: the checkpoint's")
    max_num_seqs: int = Field(256, gt=0, description="sequences of one pass at most")
    num_speculative_tokens: int = Field(8, gt=0, description="draft tokens of one sequence in a pass at most")
    enforce_eager: bool = Field(
        False, description="no compilation and no CUDA graphs: starts in seconds, runs slower; unset: on CPUs alone"
    )
    adapters: dict[str, str] = Field(
        default_factory=dict,
        description='LoRA adapters by name, as JSON: {"name": "DIR"}; a draft has none',
    )
    args: dict[str, Any] = Field(
        default_factory=dict, description='more of vLLM\'s EngineArgs, as JSON: {"max_num_batched_tokens": 8192}'
    )


class ModelServiceSettings(EngineSettings):
    """Settings of a service with a model."""

    model: str = Field(min_length=1, description="checkpoint directory or hub id (safetensors)")
    revision: str = Field("", description="branch, tag or commit of a hub id; empty: its main branch")
    device: str = Field("cpu", description="torch device, such as cpu or cuda:0")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="dtype of weights and cache; auto: on a CPU bfloat16 if supported, else float32; "
        "on other devices the checkpoint's dtype",
    )
    backend: Literal["auto", "torch", "avx512", "cuda"] = Field(
        "auto",
        description="backend that computes the passes; auto: avx512 (C kernels) on CPUs with AVX512-BF16, else torch; "
        "cuda: graphs and Triton kernels for GPUs (extra gpu), not yet measured",
    )
    kv_slots: int = Field(
        0, ge=0, description="size of the KV cache in tokens, over all sequences; 0: as much as memory_fraction allows"
    )
    memory_fraction: float = Field(
        0.4,
        gt=0,
        le=1,
        description="share of the memory after the weights for KV cache and activations; "
        "the shares of all services on one device must add up to at most 1",
    )
    threads: int = Field(0, ge=0, le=4096, description="CPU threads of the model; 0: one per available core")
    engine: Literal["torch", "vllm"] = Field(
        "torch", description="what runs the model; vllm: several GPUs, quantised checkpoints (extra vllm)"
    )
    vllm: VllmSettings = Field(default_factory=VllmSettings, description="settings of engine vllm, in vLLM's words")

    @field_validator("vllm")
    @classmethod
    def _of_engine_vllm(cls, value: VllmSettings, others: ValidationInfo) -> VllmSettings:
        given = sorted(value.model_dump(exclude_defaults=True))
        if others.data.get("engine") == "torch" and given:
            raise ValueError(f"only engine vllm has {', '.join(given)}")
        if others.data.get("engine") == "vllm" and others.data.get("backend") != "auto":
            raise ValueError("engine vllm computes passes by itself: backend is of engine torch")
        return value


def lacks(error: ImportError) -> str:
    """What is not installed, in words."""
    extras = {"numpy": "ngram", "starlette": "http", "uvicorn": "http"}
    return f"{error}; pip install -e '.[{extras.get(error.name or '', 'models')}]' in a checkout has it"


def parse(cls: type[Settings], arguments: Sequence[str], program: str) -> Settings:
    """Settings from flags, else environment, else defaults. Prints every bad value and exits with status 2."""
    source: CliSettingsSource[Settings] = CliSettingsSource(cls, cli_prog_name=program)
    try:
        return CliApp.run(cls, cli_args=list(arguments), cli_settings_source=source)
    except ValidationError as error:
        for problem in error.errors():
            name = ".".join(str(part) for part in problem["loc"]).replace("_", "-")
            print(f"{program}: --{name}: {problem['msg']}", file=sys.stderr)
    except SettingsError as error:
        print(f"{program}: {error}", file=sys.stderr)
    except ImportError as error:  # a check may need what a service needs
        print(f"{program}: {lacks(error)}", file=sys.stderr)
    raise SystemExit(2)
