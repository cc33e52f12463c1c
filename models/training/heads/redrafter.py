"""A ReDrafter head that can be trained (https://arxiv.org/abs/2403.09919): a small recurrent network over the drafted
tokens beside one state of the target.

Names of weights are those of https://github.com/apple/ml-recurrent-drafter. A growth from row t reads the target's
state at t, after its last norm. Step k has read tokens t + 1 to t + 1 + k and predicts token t + 2 + k.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.training.heads.learning import Lesson

_NUM_LAYERS = 2


class _Block(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.silu(self.linear(x))


class ReDrafter(nn.Module):
    """As ``Head`` in ``kinds``. Its exit is as wide as the target's states, as the output's rows are the target's."""

    TITLE: ClassVar[str] = "ReDrafter"
    STEPS: ClassVar[int] = 5
    DECAY: ClassVar[float] = 1.0
    boundaries: ClassVar[list[int]] = []

    def __init__(self, config: Any, output: Tensor, steps: int) -> None:
        super().__init__()
        size = config.hidden_size
        self.steps = steps
        self.input_proj = nn.Linear(2 * size, size)
        self.lm_head = nn.Sequential(*(_Block(size) for _ in range(_NUM_LAYERS)))
        self.rnn_u = nn.Linear(size, size)
        self.rnn_w = nn.Linear(size, size, bias=False)
        self.output: Tensor
        self.register_buffer("output", output, persistent=False)

    def start_from(self, model: Any) -> None:
        """Blocks that change nothing. What reads two inputs stays random."""
        for parameter in self.lm_head.parameters():
            nn.init.zeros_(parameter)

    def unroll(self, embedded: Tensor, found: Lesson) -> list[Tensor]:
        """The states of all steps, [batch, rows, d] each, as if each row began a growth of its own."""
        last = found.last[:, : embedded.shape[1]]
        memory = torch.zeros_like(embedded)
        states = []
        for step in range(self.steps):
            shifted = F.pad(embedded[:, step:], (0, 0, 0, step))
            memory = F.silu(self.rnn_w(shifted) + self.rnn_u(memory))
            states.append(self.lm_head(self.input_proj(torch.cat([last, memory], -1))))
        return states

    def logits(self, states: Tensor) -> Tensor:
        """[..., d] -> [..., draft vocabulary]."""
        return states @ self.output.T

    def files(self, config: Any, ids: Tensor, tied: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json, and the tensors beside the trained ones."""
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
