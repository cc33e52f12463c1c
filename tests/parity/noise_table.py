"""The generator's words from a table, made beforehand by the reference generator: same numbers, five times faster.

Only what draws them is replaced, `specdec.core.noise._words`. Which key is asked for is up to the services.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.core import noise
from specdec.core.noise import Domain, Key
from tests.parity import reference


class NoiseTable:
    """Words of ``seeds`` at positions below ``num_positions``, for bases up to ``reach`` before and for base 0.

    Takes the place of specdec.core.noise._words for vocabularies of up to four tokens, whose rows are one counter.
    """

    def __init__(self, seeds: Sequence[int], num_positions: int, reach: int) -> None:
        self._row_of = {seed: row for row, seed in enumerate(seeds)}
        self._reach = reach
        positions = np.arange(num_positions)[:, None, None]
        bases = np.maximum(positions - np.arange(reach + 1)[None, :, None], 0)
        bases = np.concatenate([bases, np.zeros_like(bases[:, :1])], axis=1)  # the last one: base 0
        domains = np.arange(5)[None, None, :]
        every_seed = np.array(seeds, dtype=np.uint64)[:, None, None, None]
        words = reference.philox([positions[None], bases[None], 0, domains[None]], every_seed)
        # [seed, position, base, domain, word]
        self._words = torch.from_numpy(np.stack(words, axis=-1).astype(np.int64))
        self._drawn = noise._words

    def __call__(self, keys: Sequence[Key], rows: Tensor, quads: Tensor, domain: Domain) -> Tensor:
        if any(key.seed not in self._row_of for key in keys):
            return self._drawn(keys, rows, quads, domain)
        assert not quads.any()
        starts = [0 if domain is Domain.COUPLED else key.base for key in keys]
        backs = [key.position - start if start else self._reach + 1 for key, start in zip(keys, starts, strict=True)]
        index = [[self._row_of[key.seed] for key in keys], [key.position for key in keys], backs]
        table = torch.tensor(index, dtype=torch.int64)  # [3, keys]
        at = table[:, rows.expand(torch.broadcast_shapes(rows.shape, quads.shape))]  # [3, ...]
        return self._words[at[0], at[1], at[2], int(domain)].movedim(-1, 0)  # [4, ...]
