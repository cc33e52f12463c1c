"""Loading: from a checkpoint on disk to a model that passed the probe, with a KV pool that fits into memory."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from specdec.backends.base import Backend
from specdec.backends.choice import choose, default_dtype
from specdec.backends.linears import weight_bytes
from specdec.core.rounds import ModelInfo
from specdec.core.settings import ModelServiceSettings
from specdec.runner import cgroup, memory, probe
from specdec.runner.checkpoint import Checkpoint
from specdec.runner.failures import in_words
from specdec.runner.model_runner import ModelRunner
from specdec.runner.weights import check_loaded
from specdec.sampling.grammar import Grammars

log = logging.getLogger(__name__)

_NUM_ATTACHED_SLOTS = 1024
"""Of the pool while a head is attached."""

_SIGNAL_POLL_S = 1.0
"""Interval of checks for signals during loading."""


def load_runner(settings: ModelServiceSettings, attach: Callable[[ModelRunner], None] | None = None) -> ModelRunner:
    """Find, check and load the model of a service. Raises ValueError with one sentence for the operator, whatever went
    wrong; the original traceback is logged at level DEBUG.

    ``attach`` adds a head to the model, with a small pool. What it takes on the device, its layers of the pool
    included, is part of the memory plan.

    Loads in a separate thread, which then ends. OpenMP gives every computing thread its own helpers. Once there are
    more helpers than cores, they sleep after every operation instead of waiting for the next: with two threads on two
    cores a pass took twice as long.
    """
    log.info("loading", extra={"model": settings.model, "device": settings.device})
    torch.set_num_threads(settings.threads or default_threads())  # for this thread and all later ones
    with ThreadPoolExecutor(1, "loading") as loading:
        runner = loading.submit(_load_runner, settings, attach)
        # A wait without a timeout would delay the handling of a signal that comes just before it.
        while not wait([runner], _SIGNAL_POLL_S).done:
            pass
        try:
            return runner.result()
        except Exception as error:
            log.debug("the model cannot be served", exc_info=error)
            raise ValueError(f"{settings.model}: {in_words(error)}") from error


def _load_runner(settings: ModelServiceSettings, attach: Callable[[ModelRunner], None] | None) -> ModelRunner:
    disable_progress_bar()  # type: ignore[no-untyped-call]  # logs are JSON lines
    set_verbosity_error()  # type: ignore[no-untyped-call]  # what it would warn of is checked here
    device = _device(settings.device)
    dtype = default_dtype(device) if settings.dtype == "auto" else settings.dtype
    backend = choose(settings.backend, device)
    checkpoint = Checkpoint.find(
        settings.model, dtype, backend.name, fingerprint=backend.fingerprint, revision=settings.revision
    )
    return _prepare(checkpoint, settings, backend, attach=attach)


def _prepare(
    checkpoint: Checkpoint,
    settings: ModelServiceSettings,
    backend: Backend,
    *,
    attach: Callable[[ModelRunner], None] | None,
) -> ModelRunner:
    _refuse_without_room(checkpoint.directory, checkpoint.dtype, backend.device)
    model = _load(checkpoint.directory, checkpoint.dtype, backend.device)
    expected = probe.plain_logits(model, checkpoint.info)
    runner = probe.prove(model, checkpoint.info, backend, expected=expected)
    runner.grammars = grammars(checkpoint.directory, checkpoint.info)
    if attach is not None:
        runner.resize(_NUM_ATTACHED_SLOTS)
        attach(runner)
    plan = memory.plan(
        _shape(runner),
        weights=weight_bytes(runner.model),
        bytes_per_slot=runner.bytes_per_slot,
        free=memory.free_memory(backend.device),
        kv_slots=settings.kv_slots,
        fraction=settings.memory_fraction,
        max_sequences=settings.max_sequences,
    )
    runner.resize(plan.num_slots)
    runner.measure_chunk()
    log.info("backend", extra={"backend": backend.name, "kernels": backend.fingerprint, **backend.report(runner.model)})
    log.info("memory", extra=plan.report())
    log.info("prefill", extra={"rows_per_pass": runner.chunk.rows})
    if plan.num_slots < checkpoint.info.context_length:
        log.warning("the KV pool is smaller than the model's context: requests longer than the pool will fail")
    return runner


def grammars(directory: Path, info: ModelInfo) -> Grammars | None:
    """Of a checkpoint that has a tokenizer and end tokens."""
    file = directory / "tokenizer.json"
    return Grammars(str(file), info.vocab_size, info.eos_token_ids) if file.exists() and info.eos_token_ids else None


def _refuse_without_room(directory: Path, dtype: str, device: torch.device) -> None:
    """Raises ValueError if the weights do not fit. Without it, the kernel kills a process that takes too much."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=False)
    with torch.device("meta"):  # which has shapes alone
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    needed = sum(weight.numel() for weight in model.parameters()) * getattr(torch, dtype).itemsize
    if needed > (free := memory.free_memory(device)):
        raise ValueError(
            f"its weights need {memory.size(needed)} in {dtype}, and {device} has {memory.size(free)} free"
        )


def _load(directory: Path, dtype: str, device: torch.device) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=getattr(torch, dtype),
        use_safetensors=True,
        trust_remote_code=False,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    model, findings = loaded
    check_loaded(model, findings)
    moved: PreTrainedModel = torch.nn.Module.to(model, device)  # transformers hides the signature
    return moved


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"there is no device {name}: {in_words(error)}") from error
    return device


def default_threads() -> int:
    """torch's default number of threads, but at most the container's CPU quota, which spinning threads would use up."""
    return max(1, int(min(torch.get_num_threads(), cgroup.cpu_quota())))


def _shape(runner: ModelRunner) -> memory.Shape:
    config: Any = runner.model.config.get_text_config()
    return memory.Shape(
        hidden_size=config.hidden_size,
        widest=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        vocab_size=runner.info.vocab_size,
        num_layers=config.num_hidden_layers,
        context_length=runner.info.context_length,
        element_bytes=math.ceil(runner.model.dtype.itemsize),
        num_heads=config.num_attention_heads,
        num_kv_heads=getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
        num_reaches=len(set(getattr(config, "layer_types", None) or [""])),
        caps_scores=getattr(config, "attn_logit_softcapping", None) is not None,
        logits_per_call=runner.backend.logits_per_call,
    )
