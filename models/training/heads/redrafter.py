"""A ReDrafter head that can be trained (https://arxiv.org/abs/2403.09919): a small recurrent network over the drafted
tokens, next to one state of the target.

Names of weights are those of https://github.com/apple/ml-recurrent-drafter. A growth from row t reads the target's
state at t, after its last norm. Step k has read tokens t + 1 to t + 1 + k and predicts token t + 2 + k.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.training.heads.base import Head, Lesson

_NUM_LAYERS = 2


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class ReDrafter(Head):
    """Its exit is as wide as the target's states, as the output's rows are the target's."""

    TITLE = "ReDrafter"
    STEPS = 5
    DECAY = 1.0

    def __init__(self, config: Any, output: Tensor, steps: int) -> None:
        super().__init__(output, steps)
        size = config.hidden_size
        self.input_proj = nn.Linear(2 * size, size)
        self.lm_head = nn.Sequential(*(_Block(size) for _ in range(_NUM_LAYERS)))
        self.rnn_u = nn.Linear(size, size)
        self.rnn_w = nn.Linear(size, size, bias=False)

    def start_from(self, model: Any) -> None:
        """Blocks that change nothing. What reads two inputs stays random."""
        for parameter in self.lm_head.parameters():
            nn.init.zeros_(parameter)

    def unroll(self, embedded: Tensor, given: Lesson) -> list[Tensor]:
        last = given.last[:, : embedded.shape[1]]
        recurrent = torch.zeros_like(embedded)
        states = []
        for step in range(self.steps):
            shifted = F.pad(embedded[:, step:], (0, 0, 0, step))
            recurrent = F.silu(self.rnn_w(shifted) + self.rnn_u(recurrent))
            states.append(self.lm_head(self.input_proj(torch.cat([last, recurrent], -1))))
        return states

    def files(self, config: Any, ids: Tensor, tied: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        weights = {} if tied else {f"lm_head.{_NUM_LAYERS}.weight": self.output}
        if len(ids) < config.vocab_size:
            weights["d2t"] = ids - torch.arange(len(ids), device=ids.device)
        return {
            "architectures": ["RecurrentDrafter"],
            "model_type": "recurrent_drafting_drafter",
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "exit_dim": config.hidden_size,
            "num_draft_layers": _NUM_LAYERS,
            "rnn": True,
            "tie_word_embeddings": tied,
        }, weights
