"""What sampling keeps of a sequence between passes, and the logits of many sequences as it makes them.

Used alike by draft and target: both draw at the same places with the same noise. Knows places (a sequence and a
position); refuses to know models, trees' fates and who asks.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from specdec.core.errors import SpecdecError
from specdec.core.sequence import Draw, SequenceSpec
from specdec.core.tree import TokenTree
from specdec.sampling.logits_processors import Mask, Transforms, transformed


class SamplingState:
    """One sequence's."""

    def __init__(self, spec: SequenceSpec, mask: Mask | None = None) -> None:
        """``mask`` is the grammar at the beginning of the output, and belongs to this state from now on."""
        self.spec = spec
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
