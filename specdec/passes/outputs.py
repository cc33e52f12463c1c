"""What a pass gives, of all its rows and of those of one segment. Knows rows; refuses to know models."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


class PassOutputs:
    """Of the segments of a pass, one after the other. Then come the rows that followed, in each of their passes one of
    every segment.

    A row that is not sound has NaN or infinity in it, or in its logits. Nothing of it reaches another sequence, but
    what is computed after it in its own text means nothing.
    """

    def __init__(
        self,
        logits: Tensor | np.ndarray,  # [logit rows, vocab_size], in the model's dtype
        features: Tensor | np.ndarray,  # [logit rows, hidden_size]: what the output embedding read
        sound: Tensor | np.ndarray,  # [rows] bool
        likeliest: Sequence[int] | None = None,
        further: Sequence[Sequence[int]] = (),
    ) -> None:
        """Arrays have bfloat16 as int16, and become tensors when somebody asks for them. Whatever is called of torch
        lets go of the interpreter for a moment, and a thread that carries the last pass's tokens may keep it."""
        self._logits, self._features, self._sound = logits, features, sound
        self.likeliest = likeliest
        """The token of each logit row, of equals the first. None: it did not come along."""
        self.further = further
        """Token ids of the rows that followed, of each segment; none: there are no such rows."""

    @functools.cached_property
    def logits(self) -> Tensor:  # [logit rows, vocab_size], in the model's dtype
        return _tensor(self._logits)

    @functools.cached_property
    def features(self) -> Tensor:  # [logit rows, hidden_size]
        return _tensor(self._features)

    @functools.cached_property
    def sound_rows(self) -> list[bool]:
        """Brought from the device in one piece."""
        rows: list[bool] = self._sound.tolist()
        return rows

    def as_one(self) -> RowOutputs:
        """Of a pass with one segment."""
        return RowOutputs(self, range(len(self._sound)), range(len(self._logits)))


class RowOutputs:
    """Of one segment: its rows, or ``logit_rows``, and those that followed. Nothing is taken out of a pass unless
    somebody asks for it: with cold caches every tensor that is made costs as much as a small model's layer."""

    def __init__(self, outputs: PassOutputs, rows: Sequence[int], logit_rows: Sequence[int], place: int = 0) -> None:
        """``rows`` and ``logit_rows``: where these are in the pass, of which this is the segment at ``place``."""
        self._pass, self._rows, self._logit_rows = outputs, rows, logit_rows
        self.further = outputs.further[place] if outputs.further else ()
        """Token ids of the rows that followed, which may be fewer than were welcome."""

    @property
    def logits(self) -> Tensor:  # [logit rows, vocab_size], in the model's dtype
        return _taken(self._pass.logits, self._logit_rows)

    @property
    def features(self) -> Tensor:  # [logit rows, hidden_size]: what the output embedding read
        return _taken(self._pass.features, self._logit_rows)

    @property
    def likeliest(self) -> list[int] | None:
        """See PassOutputs."""
        likeliest = self._pass.likeliest
        return None if likeliest is None else [likeliest[row] for row in self._logit_rows]

    @property
    def sound(self) -> list[bool]:
        """See PassOutputs."""
        return [self._pass.sound_rows[row] for row in self._rows]


def of_segments(outputs: PassOutputs, num_rows: Sequence[int], num_logit_rows: Sequence[int]) -> list[RowOutputs]:
    """By the numbers of rows of each segment of a pass."""
    num_further = len(outputs.further[0]) if outputs.further else 0
    places = zip(_places(num_rows, num_further), _places(num_logit_rows, num_further), strict=True)
    return [RowOutputs(outputs, rows, logit_rows, place) for place, (rows, logit_rows) in enumerate(places)]


def _places(counts: Sequence[int], num_further: int) -> list[Sequence[int]]:
    """Where the rows of each segment are."""
    places: list[Sequence[int]] = []
    start, total, num = 0, sum(counts), len(counts)
    for place, count in enumerate(counts):
        own = range(start, start + count)
        start += count
        places.append([*own, *range(total + place, total + num_further * num, num)] if num_further else own)
    return places


def _tensor(numbers: Tensor | np.ndarray) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else torch.from_numpy(numbers).view(torch.bfloat16)


def _taken(rows: Tensor, places: Sequence[int]) -> Tensor:
    return rows[places.start : places.stop] if isinstance(places, range) else rows[places]
