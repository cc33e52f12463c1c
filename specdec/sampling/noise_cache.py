"""The coupled noise of a pass, with a cache of whole rows for all sequences of a model.

A row is a pure function of seed and position, so a row that is not cached is drawn again, with the same bits.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.noise import Domain, Key, exponentials, exponentials_at

MAX_KEPT_ROWS = 256
"""Rows cached per model: siblings, later rounds and passes ahead of the verdict read the same positions again."""


class KeptRows:
    """A cache of the ``max_rows`` most recently used rows, all with one vocabulary and on one device."""

    def __init__(self, max_rows: int = MAX_KEPT_ROWS) -> None:
        self._max_rows = max_rows
        self._rows: OrderedDict[Key, Tensor] = OrderedDict()  # [vocab] float64 each

    def __len__(self) -> int:
        return len(self._rows)

    def get(self, key: Key) -> Tensor | None:  # [vocab] float64
        if key in self._rows:
            self._rows.move_to_end(key)
        return self._rows.get(key)

    def keep(self, key: Key, row: Tensor) -> None:
        self._rows[key] = row
        if len(self._rows) > self._max_rows:
            self._rows.popitem(last=False)


class PassNoise:
    """See specdec.sampling.distributions.Noise: row i of the batch has the noise of ``keys[i]``."""

    def __init__(self, keys: Sequence[Key], vocab_size: int, device: torch.device, kept: KeptRows) -> None:
        self._keys = keys
        self._vocab_size = vocab_size
        self._device = device
        self._kept = kept

    def rows(self, rows: Sequence[int]) -> Tensor:  # [len(rows), vocab] float64
        keys = [self._keys[row] for row in rows]
        known = {key: self._kept.get(key) for key in dict.fromkeys(keys)}
        missing = [key for key, row in known.items() if row is None]
        drawn = exponentials(missing, Domain.COUPLED, self._vocab_size, device=self._device)
        for key, row in zip(missing, drawn, strict=True):
            # A clone, because a view would keep all rows of this draw in memory.
            self._kept.keep(key, row.clone() if len(missing) > 1 else row)
        if len(missing) == len(keys):
            return drawn
        known.update(zip(missing, drawn, strict=True))
        return torch.stack([row for key in keys if (row := known[key]) is not None])

    def at(self, rows: Tensor, token_ids: Tensor) -> Tensor:  # [n] float64
        return exponentials_at(self._keys, rows, token_ids, Domain.COUPLED)
