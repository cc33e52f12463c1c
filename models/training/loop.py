"""The training loop of all models: flags, optimizers and their schedule, progress, and what a resumed run continues.

A run has a budget of wall-clock time. Its learning rates fall to zero at the end, so that a run of any length ends
annealed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from models.training.texts import Batch, Text, batches

SAVE_EVERY_S = 60.0
LOG_EVERY_S = 10.0
WARMUP_SHARE = 0.02
"""Of the time, in which the learning rates rise; afterwards they fall linearly."""


class Flags(argparse.Namespace):
    """The flags of every training."""

    output: Path
    minutes: float
    device: str
    bfloat16: bool
    batch_tokens: int
    muon_rate: float
    adamw_rate: float

    def autocast(self) -> torch.autocast:
        """In bfloat16 on a GPU or where asked for."""
        return torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=is_bfloat16(self))


def is_bfloat16(flags: Flags) -> bool:
    return flags.bfloat16 or flags.device != "cpu"


def parser_of(name: str, description: str, muon_rate: float, adamw_rate: float) -> argparse.ArgumentParser:
    """A parser of ``Flags``, with the default learning rates."""
    parser = argparse.ArgumentParser(name, description=description)
    parser.add_argument("--output", type=Path, required=True, help="directory of what is trained")
    parser.add_argument("--minutes", type=float, required=True, help="wall-clock budget")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu or cuda")
    parser.add_argument("--bfloat16", action="store_true", help="also on a CPU: faster where it has instructions")
    parser.add_argument("--batch-tokens", type=int, help="tokens in one batch")
    parser.add_argument("--muon-rate", type=float, default=muon_rate, help="peak learning rate of hidden matrices")
    parser.add_argument("--adamw-rate", type=float, default=adamw_rate, help="that of embeddings and vectors")
    return parser


def report(line: str) -> None:
    """Print without buffering, so that a log file shows the state of the run."""
    print(line, flush=True)


def load(path: str, flags: Flags) -> tuple[Any, Any]:
    """A target, frozen, and its tokenizer; in float32 or bfloat16."""
    transformers_logging.set_verbosity_error()
    dtype = torch.bfloat16 if is_bfloat16(flags) else torch.float32
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    return model.to(flags.device).eval().requires_grad_(False), AutoTokenizer.from_pretrained(path)


class Clock:
    """A budget of wall-clock time, of which an earlier run may have used a part."""

    def __init__(self, seconds: float, used: float = 0.0) -> None:
        self._seconds, self._start = seconds, time.monotonic() - used

    @property
    def used(self) -> float:
        return time.monotonic() - self._start

    @property
    def progress(self) -> float:
        return min(self.used / self._seconds, 1.0)


class ScheduledOptimizer:
    """Muon for the hidden matrices, AdamW for embeddings and vectors, with one schedule for both."""

    def __init__(self, model: nn.Module, muon_rate: float, adamw_rate: float) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        embeddings = [p for name, p in named if p.ndim == 2 and "embed" in name]
        vectors = [p for _, p in named if p.ndim < 2]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=muon_rate, weight_decay=0.05, momentum=0.95),
            torch.optim.AdamW(
                [{"params": part} for part in (embeddings, vectors) if part],
                lr=adamw_rate,
                betas=(0.9, 0.95),
                weight_decay=0.0,
            ),
        ]
        self._groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        self._peaks = [group["lr"] for group in self._groups]

    def step(self, progress: float) -> None:
        """Apply the gradients with the learning rates for ``progress`` in [0, 1], and clear the gradients."""
        factor = min(progress / WARMUP_SHARE, (1 - progress) / (1 - WARMUP_SHARE))
        for group, peak in zip(self._groups, self._peaks, strict=True):
            group["lr"] = peak * max(factor, 0.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dicts(self) -> list[dict[str, Any]]:
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dicts(self, states: Sequence[dict[str, Any]]) -> None:
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)


def train(
    model: nn.Module,
    texts: Sequence[Text],
    add_gradients: Callable[[Batch], Tensor],
    *,
    flags: Flags,
    seconds: float,
    state: Path | None = None,
) -> int:
    """Train until the time is used up. The number of tokens seen.

    ``add_gradients``: of a batch; it returns the loss, which is reported. ``state``: the file in which progress is
    saved, and from which a run continues.
    """
    optimizer = ScheduledOptimizer(model, flags.muon_rate, flags.adamw_rate)
    used, num_tokens, step = 0.0, 0, 0
    if state is not None and state.is_file():
        saved_state = torch.load(state, weights_only=True, map_location=flags.device)
        model.load_state_dict(saved_state["model"])
        optimizer.load_state_dicts(saved_state["optimizer"])
        used, num_tokens = saved_state["used"], saved_state["num_tokens"]
    clock = Clock(seconds, used)
    logged = saved = time.monotonic()
    for batch in batches(texts, flags.batch_tokens, flags.device, seed=num_tokens):
        if clock.progress >= 1:
            break
        loss = add_gradients(batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(clock.progress)
        num_tokens, step, now = num_tokens + int(batch.is_answer.sum()), step + 1, time.monotonic()
        if now - logged > LOG_EVERY_S:
            logged = now
            report(f"{clock.used:5.0f} s step {step} loss {float(loss):.3f} {num_tokens} tokens")
        if state is not None and now - saved > SAVE_EVERY_S:
            saved = now
            progress = {"used": clock.used, "num_tokens": num_tokens}
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dicts(), **progress}, state)
    return num_tokens
