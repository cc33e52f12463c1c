"""What sampling keeps of a sequence between passes, and the draw for rows of many sequences at once.

Used alike by draft and target: both draw at the same places with the same noise. Knows places (a sequence and a
position); refuses to know models, trees' fates and who asks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.backends.avx512 import coupled_draw
from specdec.core.errors import SpecdecError
from specdec.core.limits import NUMBERS_AT_ONCE, portions
from specdec.core.noise import Key
from specdec.core.sequence import Draw, SamplingParams, SequenceSpec
from specdec.core.tree import TokenTree
from specdec.sampling.distributions import Noise, runners_up, sample_coupled
from specdec.sampling.logits_processors import Mask, Transforms, transformed
from specdec.sampling.noise_cache import KeptRows, PassNoise


class SamplingState:
    """One sequence's. ``kept`` are the rows of noise of its model, which all its sequences share."""

    def __init__(self, spec: SequenceSpec, mask: Mask | None = None, kept: KeptRows | None = None) -> None:
        """``mask`` is the grammar at the beginning of the output, and belongs to this state from now on."""
        self.spec = spec
        self.kept = KeptRows() if kept is None else kept
        self.transforms = Transforms(spec, mask)

    @property
    def draws_by_logits(self) -> bool:
        """What is drawn is what ``draw`` tells, by the model's logits as they are."""
        return self.spec.keyed_by_token and not self.transforms.active

    @property
    def takes_likeliest(self) -> bool:
        """What is drawn is the likeliest token, by the model's logits as they are."""
        return self.spec.sampling.greedy and self.draws_by_logits

    def draw(self, position: int) -> Draw:
        """At a position of its text."""
        return Draw(self.spec.sampling, self.spec.seed, position)

    def take_in(self, ids: Sequence[int]) -> SpecdecError | None:
        """What is committed, before anything is drawn after it. What is wrong with it, if so: that ends this sequence,
        and none of its neighbours."""
        try:
            self.transforms.take_in(ids)
        except SpecdecError as error:
            return error
        return None


def rows_of(logits: Sequence[Tensor], places: Sequence[tuple[SamplingState, TokenTree]]) -> Tensor:  # [rows, vocab]
    """The logits of all sequences one below the other, as penalties, bias and the like make them.

    A place is a sequence and the tree below its committed ids, which were taken in; its logits [n, vocab] are of the
    last n of the root and the tree's nodes.
    """
    return transformed(logits, [(state.transforms, tree) for state, tree in places])


def choose(rows: Tensor, places: Sequence[tuple[SamplingState, int]]) -> Tensor:  # [rows] int64
    """Greedy and coupled: the token that is drawn at each place, by rows [rows, vocab] of logits."""
    if coupled_draw.takes(rows):
        return coupled_draw.coupled_draw(rows, [state.draw(position) for state, position in places])
    [tokens] = _by_portions(lambda some, params, noise: (sample_coupled(some, params, noise),), rows, places)
    return tokens


def rank(rows: Tensor, places: Sequence[tuple[SamplingState, int]], count: int) -> tuple[Tensor, Tensor]:
    """Greedy and coupled: the tokens likeliest to be drawn at each place by a model near this one, likeliest first, and
    their scores: [rows, count] int64 and float64. No filters: see specdec.sampling.runners_up."""
    if coupled_draw.takes(rows):
        draws = [Draw(_unfiltered(state.spec.sampling), state.spec.seed, position) for state, position in places]
        return coupled_draw.leaders(rows, draws, min(count, rows.shape[-1]))
    tokens, scores = _by_portions(lambda some, params, noise: runners_up(some, params, noise, count), rows, places)
    return tokens, scores


def _unfiltered(sampling: SamplingParams) -> SamplingParams:
    return SamplingParams(sampling.temperature)


def _by_portions(
    draw: Callable[[Tensor, Sequence[SamplingParams], Noise], tuple[Tensor, ...]],
    rows: Tensor,
    places: Sequence[tuple[SamplingState, int]],
) -> Sequence[Tensor]:  # [rows, ...] each
    """``draw`` for all rows [rows, vocab], some at a time. The places are of one model's sequences."""
    drawn = []
    for part in portions([rows.shape[-1]] * len(rows), NUMBERS_AT_ONCE):
        some = [places[row] for row in part]
        keys = [Key(state.spec.seed, position) for state, position in some]
        noise = PassNoise(keys, rows.shape[-1], rows.device, some[0][0].kept)
        drawn.append(draw(rows[part.start : part.stop], [state.spec.sampling for state, _ in some], noise))
    return drawn[0] if len(drawn) == 1 else [torch.cat(parts) for parts in zip(*drawn, strict=True)]
