"""What every service can be told, by flag (``--kv-slots``) or environment (``SPECDEC_KV_SLOTS``).

A service adds its own fields in a subclass. All bad values are reported at once, at the start.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import Field, ValidationError, ValidationInfo, field_validator
from pydantic_settings import BaseSettings, CliApp, CliSettingsSource, SettingsConfigDict, SettingsError

Settings = TypeVar("Settings", bound=BaseSettings)


class ServiceSettings(BaseSettings):
    """Of every service."""

    model_config = SettingsConfigDict(
        env_prefix="SPECDEC_", cli_kebab_case=True, extra="ignore", cli_implicit_flags=True, validate_default=True
    )

    host: str = Field("127.0.0.1", description="address to listen on; of IPv6 with or without brackets")
    port: int = Field(0, ge=0, le=65535, description="port to listen on; 0: any free one, printed at the start")
    health_port: int | None = Field(
        None, ge=0, le=65535, description="port for gRPC health alone, in the clear whatever the other one speaks"
    )
    metrics_port: Annotated[int, Field(ge=0, le=65535)] | None = Field(
        None, description="port of the metrics for Prometheus, at /metrics; 0: any free one; unset: none"
    )
    tls_cert: str = Field("", description="certificate chain in PEM; its subjectAltName has the service's name")
    tls_key: str = Field("", description="private key of tls_cert in PEM")
    tls_ca: str = Field(
        "", description="certificates in PEM of whom to trust; with tls_cert and tls_key: mutual TLS, else in the clear"
    )
    insecure: bool = Field(False, description="listen on other addresses than loopback without TLS")
    reflection: bool = Field(False, description="serve gRPC reflection")
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field("INFO", description="least level logged")
    shutdown_grace_s: float = Field(10.0, ge=0, description="seconds to end in good order after SIGTERM")

    def address(self, port: int) -> str:
        """Where it listens, as host:port."""
        return f"[{self.host}]:{port}" if ":" in self.host else f"{self.host}:{port}"

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
                f"{host} can be reached from other machines, and without tls_cert, tls_key and tls_ca anybody there can"
                " read and ask everything: set these, or insecure if the network is yours alone"
            )
        return value


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class EngineSettings(ServiceSettings):
    """Of a service with an engine, whatever computes in it."""

    max_sequences: int = Field(1024, gt=0, description="sequences open at a time")
    hung_pass_s: float = Field(
        60.0,
        gt=0,
        description="a model's pass of so many seconds makes the service NOT_SERVING, one of twice as many ends it",
    )


class ModelServiceSettings(EngineSettings):
    """Of a service with a model."""

    model: str = Field(description="checkpoint directory or hub id (safetensors)")
    device: str = Field("cpu", description="torch device, such as cpu or cuda:0")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="dtype of weights and cache; auto: on a CPU bfloat16 if it computes in it, else float32; "
        "on other devices the checkpoint's",
    )
    backend: Literal["auto", "torch", "avx512"] = Field(
        "auto",
        description="what computes the passes; auto: avx512 (kernels in C) on CPUs that have AVX512-BF16, else torch",
    )
    kv_slots: int = Field(
        0, ge=0, description="tokens that the KV cache holds, over all sequences; 0: what memory_fraction allows"
    )
    memory_fraction: float = Field(
        0.4,
        gt=0,
        le=1,
        description="share of the memory left beside the weights that KV cache and activations may take; "
        "services on one device must not have more than 1 together",
    )
    threads: int = Field(0, ge=0, description="CPU threads of the model; 0: one for each core it may use")


def parse(cls: type[Settings], arguments: Sequence[str], program: str) -> Settings:
    """Settings from flags over environment over defaults. Exits with status 2, in words, if any is bad."""
    source: CliSettingsSource[Settings] = CliSettingsSource(cls, cli_prog_name=program)
    try:
        return CliApp.run(cls, cli_args=list(arguments), cli_settings_source=source)
    except ValidationError as error:
        for problem in error.errors():
            name = "-".join(str(part) for part in problem["loc"]).replace("_", "-")
            print(f"{program}: --{name}: {problem['msg']}", file=sys.stderr)
    except SettingsError as error:
        print(f"{program}: {error}", file=sys.stderr)
    raise SystemExit(2)
