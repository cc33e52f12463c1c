"""The coupled noise of a pass: whole rows are drawn once per sequence and position, for all sequences in one call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.noise import Domain, Key, exponentials, exponentials_at


class CoupledNoise:
    """The rows of one sequence that were drawn whole: nodes and rounds at the same position share them."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rows: dict[int, Tensor] = {}  # by position: [vocab] float64

    def forget_before(self, base: int) -> None:
        """Positions that are committed are never drawn again."""
        for position in [position for position in self.rows if position < base]:
            del self.rows[position]


class PassNoise:
    """See specdec.sampling.Noise: row i of the batch is at ``places[i]``, a sequence's noise and a position."""

    def __init__(self, places: Sequence[tuple[CoupledNoise, int]], vocab_size: int, device: torch.device) -> None:
        self._places = places
        self._vocab_size = vocab_size
        self._device = device

    def rows(self, rows: Sequence[int]) -> Tensor:  # [len(rows), vocab] float64
        places = [self._places[row] for row in rows]
        missing = {(id(noise), position): (noise, position) for noise, position in places if position not in noise.rows}
        keys = [Key(noise.seed, position) for noise, position in missing.values()]
        drawn = exponentials(keys, Domain.COUPLED, self._vocab_size, self._device)
        for (noise, position), row in zip(missing.values(), drawn, strict=True):
            # Not a view: the row of a sequence that rests would hold on to those of everybody in its pass.
            noise.rows[position] = row.clone() if len(missing) > 1 else row
        if len(missing) == len(places):
            return drawn
        return torch.stack([noise.rows[position] for noise, position in places])

    def at(self, rows: Tensor, token_ids: Tensor) -> Tensor:  # [n] float64
        keys = [Key(noise.seed, position) for noise, position in self._places]
        return exponentials_at(keys, rows, token_ids, Domain.COUPLED)
