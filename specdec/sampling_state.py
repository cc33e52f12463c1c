"""What sampling keeps of a sequence between passes, and the draw for rows of many sequences at once.

Used alike by draft and target: both draw at the same places with the same noise. Knows places (a sequence and a
position); refuses to know models, trees' fates and who asks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.noise_cache import CoupledNoise, PassNoise
from specdec.sampling import runners_up, sample_coupled
from specdec.sequence import SequenceSpec
from specdec.transforms import Mask, Transforms, transformed
from specdec.tree import TokenTree

_CACHED_NUMBERS = 1 << 18  # 2 MiB in float64


class SamplingState:
    """One sequence's."""

    def __init__(self, spec: SequenceSpec, mask: Mask | None = None) -> None:
        """``mask`` is the grammar at the beginning of the output, and belongs to this state from now on."""
        self.spec = spec
        self.noise = CoupledNoise(spec.seed)
        self.transforms = Transforms(spec, mask)


def rows_of(
    logits: Sequence[Tensor], places: Sequence[tuple[SamplingState, Sequence[int], TokenTree]]
) -> Tensor:  # [rows, vocab]
    """The logits of all sequences one below the other, as penalties, bias and the like make them.

    A place is a sequence, its committed ids and the tree below them; its logits [n, vocab] are of the last n of the
    root and the tree's nodes.
    """
    for state, ids, _ in places:
        state.transforms.take_in(ids)
    return transformed(logits, [(state.transforms, tree) for state, _, tree in places])


def choose(rows: Tensor, places: Sequence[tuple[SamplingState, int]]) -> Tensor:  # [rows] int64
    """Greedy and coupled: the token that is drawn at each place, by rows [rows, vocab] of logits."""
    # A few rows at a time: in float64 a large batch would go back and forth between processor and memory.
    num_rows = max(1, _CACHED_NUMBERS // rows.shape[-1])
    if len(rows) <= num_rows:
        return _choose(rows, places)
    return torch.cat(
        [
            _choose(rows[start : start + num_rows], places[start : start + num_rows])
            for start in range(0, len(rows), num_rows)
        ]
    )


def rank(rows: Tensor, places: Sequence[tuple[SamplingState, int]], count: int) -> Tensor:  # [rows, count] int64
    """Greedy and coupled: the tokens likeliest to be drawn at each place by a model near this one, likeliest first."""
    noise = PassNoise([(state.noise, position) for state, position in places], rows.shape[-1], rows.device)
    return runners_up(rows, [state.spec.sampling for state, _ in places], noise, count)


def _choose(rows: Tensor, places: Sequence[tuple[SamplingState, int]]) -> Tensor:
    params = [state.spec.sampling for state, _ in places]
    noise = PassNoise([(state.noise, position) for state, position in places], rows.shape[-1], rows.device)
    return sample_coupled(rows, params, noise)
