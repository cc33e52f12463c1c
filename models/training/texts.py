"""Batches of answers with what the target computed for them, and the time that is left.

A batch is padded to its longest text. The target's states are computed again for each batch: they take a hundred
times the room of the tokens.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.training.heads.answers import Answer

_ROWS_AT_ONCE = 4096
_LONG, _LONG_EVERY = 4, 8


@dataclass(frozen=True, slots=True)
class Batch:
    """``ids`` [texts, length]; ``is_answer`` is true where the token belongs to an answer."""

    ids: Tensor
    is_answer: Tensor


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the target computed: ``taps`` [texts, length, d of each boundary], ``last`` [texts, length, d] after its
    last norm, and ``scale`` [texts, length], the logarithm of the sum of its exponentiated logits, where an answer's
    token follows."""

    taps: Tensor
    last: Tensor
    scale: Tensor


class Clock:
    """A budget of wall-clock time, of which a run that was resumed has used a part."""

    def __init__(self, seconds: float, used: float = 0.0) -> None:
        self._seconds, self._start = seconds, time.monotonic() - used

    @property
    def used(self) -> float:
        return time.monotonic() - self._start

    @property
    def progress(self) -> float:
        return min(self.used / self._seconds, 1.0)


def batches(answers: Sequence[Answer], tokens: int, device: str, seed: int) -> Iterator[Batch]:
    """Endless batches of at most ``tokens`` with padding, of texts of similar length. Each epoch has another order."""
    order = random.Random(seed)
    while True:
        by_length = sorted(answers, key=lambda answer: (len(answer.ids), order.random()))
        groups: list[list[Answer]] = [[]]
        for answer in by_length:
            if (len(groups[-1]) + 1) * len(answer.ids) > tokens and groups[-1]:
                groups.append([])
            groups[-1].append(answer)
        order.shuffle(groups)
        for number, group in enumerate(groups):
            yield padded(_joined(group) if number % _LONG_EVERY == 0 else group, device)


def _joined(group: Sequence[Answer]) -> list[Answer]:
    """Four texts in a row make one with a long context. Its last answer counts."""
    found = []
    for start in range(0, len(group), _LONG):
        *before, last = group[start : start + _LONG]
        context = [token for answer in before for token in answer.ids]
        found.append(Answer([*context, *last.ids], len(context) + last.first))
    return found


def padded(group: Sequence[Answer], device: str) -> Batch:
    """The texts of a group, at the left."""
    ids = torch.zeros(len(group), max(len(answer.ids) for answer in group), dtype=torch.int64)
    is_answer = torch.zeros_like(ids, dtype=torch.bool)
    for row, answer in enumerate(group):
        ids[row, : len(answer.ids)] = torch.tensor(answer.ids)
        is_answer[row, answer.first : len(answer.ids)] = True
    return Batch(ids.to(device), is_answer.to(device))


@torch.no_grad()
def lesson(model: Any, batch: Batch, boundaries: Sequence[int]) -> Lesson:
    """``boundaries``: of layers; k is the state before layer k. Causal attention needs no mask for what is padded."""
    states = model.model(input_ids=batch.ids, output_hidden_states=bool(boundaries), use_cache=False)
    last = states.last_hidden_state
    taps = torch.cat([last[..., :0], *(states.hidden_states[boundary] for boundary in boundaries)], -1)
    scale = torch.zeros(batch.ids.shape, device=last.device)
    followed = torch.zeros_like(batch.is_answer)
    followed[:, :-1] = batch.is_answer[:, 1:]
    sums = [model.lm_head(rows).float().logsumexp(-1) for rows in last[followed].split(_ROWS_AT_ONCE)]
    scale[followed] = torch.cat(sums)
    return Lesson(taps, last, scale)
