"""The sampling state of a sequence between passes, and the processed logits of many sequences.

Draft and target both use it: they draw at the same positions with the same noise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.errors import InvalidArgument, SpecdecError
from specdec.core.one_by_one import one_by_one
from specdec.core.sequence import Draw, SequenceSpec
from specdec.core.tree import TokenTree
from specdec.sampling.grammar import GRAMMAR_FIELD
from specdec.sampling.logits_processors import Mask, Transforms, transformed

NO_TOKEN = -1


class SamplingState:
    """The sampling state of one sequence."""

    def __init__(self, spec: SequenceSpec, mask: Mask | None = None) -> None:
        """``mask``: the grammar at the beginning of the output, changed by this state. Raises as `Transforms` does."""
        self.spec = spec
        self.transforms = Transforms(spec, mask)
        self._error: SpecdecError | None = None

    @property
    def draws_by_logits(self) -> bool:
        """Whether ``draw`` applied to the model's own logits gives the token."""
        return self.spec.keyed_by_token and not self.transforms.active

    @property
    def takes_most_likely(self) -> bool:
        """Whether the token is the most likely one by the model's own logits."""
        return self.spec.sampling.greedy and self.draws_by_logits

    def draw(self, position: int) -> Draw:
        """The draw at a position of this sequence's text."""
        return Draw(self.spec.sampling, self.spec.seed, position)

    def take_in(self, ids: Sequence[int]) -> SpecdecError | None:
        """Count the committed ``ids``; required before a draw after them. Returns the error, if any, instead of raising
        it: the error ends this sequence, but not the others of the batch. From then on it is always returned."""
        if self._error is None:
            [self._error] = one_by_one(lambda texts: list(map(self.transforms.take_in, texts)), [ids])
        return self._error

    @property
    def no_token(self) -> SpecdecError:
        """The error of a sequence with NO_TOKEN drawn after its text."""
        if self.transforms.problem is not None:
            return self.transforms.problem
        if self.spec.sampling.grammar:
            return InvalidArgument([(GRAMMAR_FIELD, "is too complex at this place of the output")])
        return InvalidArgument([("spec.sampling", "every token is forbidden at this place of the output")])


def or_no_token(tokens: Tensor, rows: Tensor, states: Sequence[tuple[SamplingState, TokenTree]]) -> Tensor:
    """The ``tokens`` [rows] drawn from rows [rows, vocab] of `rows_of`: NO_TOKEN where a row forbids every token."""
    if not any(state.transforms.active for state, _ in states):
        return tokens
    return torch.where(rows.amax(-1) == -torch.inf, NO_TOKEN, tokens)


def rows_of(logits: Sequence[Tensor], states: Sequence[tuple[SamplingState, TokenTree]]) -> Tensor:  # [rows, vocab]
    """The processed logits of all sequences, concatenated: with penalties, bias, minimum length and grammar.

    A state comes with the tree below its committed ids, which ``take_in`` has counted. Its logits [n, vocab] belong to
    the last n of the root and the tree's nodes.
    """
    return transformed(logits, [(state.transforms, tree) for state, tree in states])
