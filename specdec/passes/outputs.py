"""The outputs of a pass, for all its rows and for one segment."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

NOT_DRAWN = -1


class PassOutputs:
    """The outputs of a pass: the rows of its segments in order, then the further rows, one of each segment per step.

    A row that is not sound has NaN or infinity in its values or logits. It does not affect other sequences, but later
    rows of its own text are meaningless.
    """

    def __init__(
        self,
        logits: Tensor | np.ndarray,  # [logit rows, vocab_size], in the model's dtype
        features: Tensor | np.ndarray,  # [logit rows, hidden_size]: input of the output embedding
        sound: Tensor | np.ndarray,  # [rows] bool
        most_likely: Sequence[int] | None = None,
        further: Sequence[Sequence[int]] = (),
        drawn: Sequence[int] | None = None,
    ) -> None:
        """Arrays hold bfloat16 as int16, and become tensors on demand. Every torch call releases the interpreter lock,
        and a thread that sends the last pass's tokens could delay this one there."""
        self._logits, self._features, self._sound = logits, features, sound
        self.most_likely = most_likely
        """The most likely token of each logit row, of ties the lowest id. None: not computed by the pass."""
        self.drawn = drawn
        """The token of each logit row by its segment's draw, or NOT_DRAWN. None: the pass draws none."""
        self.further = further
        """Token ids of the further rows of each segment; empty: there are no such rows."""

    @functools.cached_property
    def logits(self) -> Tensor:  # [logit rows, vocab_size], in the model's dtype
        return _tensor(self._logits)

    @functools.cached_property
    def features(self) -> Tensor:  # [logit rows, hidden_size]
        return _tensor(self._features)

    @functools.cached_property
    def sound_rows(self) -> list[bool]:
        """Whether each row is sound. Copied from the device once, for all rows."""
        rows: list[bool] = self._sound.tolist()
        return rows

    def as_one(self) -> RowOutputs:
        """The outputs of the only segment of a pass."""
        return RowOutputs(self, range(len(self._sound)), range(len(self._logits)))


class RowOutputs:
    """The outputs of one segment: of its rows or ``logit_rows``, then of its further rows. Sliced from the pass on
    demand: with cold caches every new tensor costs as much time as a layer of a small model."""

    def __init__(self, outputs: PassOutputs, rows: Sequence[int], logit_rows: Sequence[int], index: int = 0) -> None:
        """``rows``, ``logit_rows``: indices in the pass; ``index``: of the segment."""
        self._pass, self._rows, self._logit_rows, self._index = outputs, rows, logit_rows, index
        self.further = outputs.further[index] if outputs.further else ()
        """Token ids of the further rows, at most as many as the segment allows."""

    @property
    def logits(self) -> Tensor:  # [logit rows, vocab_size], in the model's dtype
        return _select(self._pass.logits, self._logit_rows)

    @property
    def most_likely(self) -> list[int] | None:
        """See PassOutputs."""
        most_likely = self._pass.most_likely
        return None if most_likely is None else [most_likely[row] for row in self._logit_rows]

    @property
    def drawn(self) -> list[int] | None:
        """The token of each logit row by the segment's draw; None: the pass has not drawn all of them."""
        drawn = [] if self._pass.drawn is None else [self._pass.drawn[row] for row in self._logit_rows]
        return drawn if drawn and NOT_DRAWN not in drawn else None

    def behind(self, num_logit_rows: int) -> RowOutputs:
        """These outputs without the first logit rows."""
        return RowOutputs(self._pass, self._rows, self._logit_rows[num_logit_rows:], index=self._index)

    @property
    def sound(self) -> list[bool]:
        """See PassOutputs."""
        return [self._pass.sound_rows[row] for row in self._rows]


def of_segments(outputs: PassOutputs, num_rows: Sequence[int], num_logit_rows: Sequence[int]) -> list[RowOutputs]:
    """The outputs of each segment of a pass, given each segment's numbers of rows and of logit rows."""
    num_further = len(outputs.further[0]) if outputs.further else 0
    by_segment = zip(_indices(num_rows, num_further), _indices(num_logit_rows, num_further), strict=True)
    return [RowOutputs(outputs, rows, logit_rows, index=index) for index, (rows, logit_rows) in enumerate(by_segment)]


def _indices(counts: Sequence[int], num_further: int) -> list[Sequence[int]]:
    """The indices of each segment's rows in the pass, further rows included."""
    indices: list[Sequence[int]] = []
    start, total, num = 0, sum(counts), len(counts)
    for segment, count in enumerate(counts):
        rows = range(start, start + count)
        start += count
        further = range(total + segment, total + num_further * num, num)
        indices.append([*rows, *further] if num_further else rows)
    return indices


def _tensor(numbers: Tensor | np.ndarray) -> Tensor:
    return numbers if isinstance(numbers, Tensor) else torch.from_numpy(numbers).view(torch.bfloat16)


def _select(rows: Tensor, indices: Sequence[int]) -> Tensor:
    return rows[indices.start : indices.stop] if isinstance(indices, range) else rows[indices]
