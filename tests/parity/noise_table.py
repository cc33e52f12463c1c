"""The generator's words from a table, made beforehand by the reference generator: same numbers, five times faster.

Only what draws them is replaced, `specdec.noise.philox`. Which key is asked for remains the services' affair.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec import noise
from tests.parity import reference


class NoiseTable:
    """Words of ``seeds`` at positions below ``num_positions``, for bases up to ``reach`` before and for base 0.

    Takes the place of specdec.noise.philox for vocabularies of up to four tokens, whose rows are one counter.
    """

    def __init__(self, seeds: Sequence[int], num_positions: int, reach: int) -> None:
        self._row_of = {(seed & 0xFFFFFFFF, seed >> 32): row for row, seed in enumerate(seeds)}
        self._reach = reach
        positions = np.arange(num_positions)[:, None, None]
        bases = np.maximum(positions - np.arange(reach + 1)[None, :, None], 0)
        bases = np.concatenate([bases, np.zeros_like(bases[:, :1])], axis=1)  # the last one: base 0
        domains = np.arange(5)[None, None, :]
        every_seed = np.array(seeds, dtype=np.uint64)[:, None, None, None]
        words = reference.philox([positions[None], bases[None], 0, domains[None]], every_seed)
        # [seed, position, base, domain, word]
        self._words = torch.from_numpy(np.stack(words, axis=-1).astype(np.int64))
        self._philox = noise.philox

    def __call__(self, counter: Sequence[int | Tensor], key: tuple[int, int]) -> tuple[int | Tensor, ...]:
        positions, base, quads, domain = counter
        row = self._row_of.get(key)
        if row is None or not isinstance(positions, Tensor) or not isinstance(quads, Tensor):
            return self._philox(counter, key)
        assert not quads.any()
        at, start = positions.flatten(), int(base)
        back = at - start if start else torch.full_like(at, self._reach + 1)
        words = self._words[row, at, back, int(domain)]  # [positions, 4]
        shape = torch.broadcast_shapes(positions.shape, quads.shape)
        return tuple(words[:, lane].reshape(positions.shape).expand(shape) for lane in range(4))
