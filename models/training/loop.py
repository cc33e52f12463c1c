"""Muon for the hidden matrices, AdamW for the embedding and the norms, with one schedule for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

WARMUP = 0.02
"""Share of the time budget in which the learning rate rises; afterwards it falls linearly to zero."""


@dataclass(frozen=True)
class Rates:
    """Peak learning rates."""

    muon: float = 0.025
    adamw: float = 0.006


class ScheduledOptimizer:
    """Both optimizers. The used share of the time budget sets their learning rates."""

    def __init__(self, model: nn.Module, rates: Rates) -> None:
        named = list(model.named_parameters())
        matrices = [p for name, p in named if p.ndim == 2 and "embed" not in name]
        embeddings = [p for name, p in named if p.ndim == 2 and "embed" in name]
        vectors = [p for _, p in named if p.ndim < 2]
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=rates.muon, weight_decay=0.05, momentum=0.95),
            torch.optim.AdamW(
                [{"params": part} for part in (embeddings, vectors) if part],
                lr=rates.adamw,
                betas=(0.9, 0.95),
                weight_decay=0.0,
            ),
        ]
        self._groups = [group for o in self._optimizers for group in o.param_groups]
        self._peaks = [group["lr"] for group in self._groups]

    def step(self, progress: float) -> None:
        """Apply the gradients with the learning rates for ``progress`` in [0, 1], and clear the gradients."""
        factor = min(progress / WARMUP, (1 - progress) / (1 - WARMUP))
        for group, peak in zip(self._groups, self._peaks, strict=True):
            group["lr"] = peak * max(factor, 0.0)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dicts(self) -> list[dict[str, Any]]:
        """What a run that is resumed goes on with."""
        return [optimizer.state_dict() for optimizer in self._optimizers]

    def load_state_dicts(self, states: list[dict[str, Any]]) -> None:
        """What ``state_dicts`` gave."""
        for optimizer, state in zip(self._optimizers, states, strict=True):
            optimizer.load_state_dict(state)
