"""The coupled noise of one sequence, drawn once per position and shared by every node and round there."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.noise import Domain, exponentials


class CoupledNoise:
    """Exponentials of (seed, position, token), kept from the base on."""

    def __init__(self, seed: int, vocab_size: int, device: torch.device) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._device = device
        self._rows: dict[int, Tensor] = {}

    def rows(self, positions: Sequence[int], base: int) -> Tensor:  # [len(positions), vocab_size] float64
        """One row per position, all >= base. Rows before ``base`` are forgotten."""
        for position in [position for position in self._rows if position < base]:
            del self._rows[position]
        missing = sorted(set(positions) - self._rows.keys())
        if missing:
            drawn = exponentials(self._seed, missing, 0, Domain.COUPLED, self._vocab_size, self._device)
            self._rows.update(zip(missing, drawn, strict=True))
        return torch.stack([self._rows[position] for position in positions])
