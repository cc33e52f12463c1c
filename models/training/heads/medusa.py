"""Medusa heads that can be trained (https://arxiv.org/abs/2401.10774): one residual block per step over the target's
last state, without the tokens between.

Names of weights are those that vLLM reads. Head k at row t reads the target's state there, after its last norm, and
predicts token t + 2 + k; token t + 1 is the target's.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from models.training.heads.base import Head, Lesson

_NUM_LAYERS = 1


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size, size) for _ in range(_NUM_LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return x


class Medusa(Head):
    """``steps`` is the number of heads."""

    TITLE = "Medusa"
    STEPS = 4
    DECAY = 0.8

    def __init__(self, config: Any, output: Tensor, steps: int) -> None:
        super().__init__(output, steps)
        self.blocks = nn.ModuleList(_Block(config.hidden_size) for _ in range(steps))

    def start_from(self, model: Any) -> None:
        """Blocks that change nothing, as published: each head starts as the target's output."""
        for parameter in self.blocks.parameters():
            nn.init.zeros_(parameter)

    def unroll(self, embedded: Tensor, given: Lesson) -> list[Tensor]:
        last = given.last[:, : embedded.shape[1]]
        return [block(last) for block in self.blocks]

    def files(self, config: Any, ids: Tensor, tied: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        weights = {"token_map": ids}
        if not tied:
            weights |= {f"lm_heads.{head}.weight": self.output.clone() for head in range(self.steps)}
        return {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "hidden_size": config.hidden_size,
            "num_heads": self.steps,
            "num_hidden_layers": _NUM_LAYERS,
            "vocab_size": config.vocab_size,
            "truncated_vocab_size": len(ids),
            "original_lm_head": tied,
            "medusa_fc_bias": True,
        }, weights
