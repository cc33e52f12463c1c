"""What heads that can be trained have in common, and what the target computed for them."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from models.training.texts import Batch

_ROWS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the target computed: ``taps`` [texts, length, d of each boundary], ``last`` [texts, length, d] after its
    last norm, and ``scale`` [texts, length], the logarithm of the sum of its exponentiated logits, where an answer's
    token follows."""

    taps: Tensor
    last: Tensor
    scale: Tensor


@torch.no_grad()
def lesson(model: Any, batch: Batch, boundaries: Sequence[int]) -> Lesson:
    """``boundaries``: of layers; k is the state before layer k. Causal attention needs no mask for what is padded.

    Computed again for each batch: the states take a hundred times the room of the tokens.
    """
    states = model.model(input_ids=batch.ids, output_hidden_states=bool(boundaries), use_cache=False)
    last = states.last_hidden_state
    taps = torch.cat([last[..., :0], *(states.hidden_states[boundary] for boundary in boundaries)], -1)
    scale = torch.zeros(batch.ids.shape, device=last.device)
    rows = last[batch.is_followed].split(_ROWS_AT_ONCE)
    scale[batch.is_followed] = torch.cat([model.lm_head(part).float().logsumexp(-1) for part in rows])
    return Lesson(taps, last, scale)


class Head(nn.Module):
    """``output``: the rows of the target's output embedding that the head can draw, [draft vocabulary, d]; they are
    not trained. ``steps``: tokens that it learns to draft in a row."""

    TITLE: ClassVar[str]
    STEPS: ClassVar[int]
    """As published."""
    DECAY: ClassVar[float]
    """The weight of a step by that before."""
    boundaries: Sequence[int] = ()
    """The states between the target's layers that it reads beside the last one."""

    def __init__(self, output: Tensor, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.output: Tensor
        self.register_buffer("output", output, persistent=False)

    @abstractmethod
    def start_from(self, model: Any) -> None:
        """Set the weights before the first step. ``model`` is the target."""

    @abstractmethod
    def unroll(self, embedded: Tensor, given: Lesson) -> list[Tensor]:
        """The states of all steps, [batch, rows, d] each, as if each row began a growth.

        Row t of ``embedded``, [batch, rows, d], has token t + 1, and step k there predicts token t + 2 + k.
        """

    def logits(self, states: Tensor) -> Tensor:
        """[..., d] -> [..., draft vocabulary]."""
        return states @ self.output.T

    @abstractmethod
    def files(self, config: Any, ids: Tensor, tied: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """config.json, and the tensors next to the trained ones.

        ``config`` is the target's. ``ids``: the target's ids of the rows of ``output``, ascending; those rows are left
        out where ``tied``.
        """
