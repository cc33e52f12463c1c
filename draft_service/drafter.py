"""The interface of a drafter, and its view of a sequence. Imports no torch."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol

from typing_extensions import TypeVar

from specdec.core.errors import SpecdecError
from specdec.core.rounds import ModelInfo
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import EMPTY_TREE, Candidate, SparseDistribution, TokenTree

State = TypeVar("State", default=Any)
"""What a drafter keeps of a sequence: a class of its own."""


class Branch(NamedTuple):
    """A node (or ROOT) that is to get its ``num_children`` most likely children; the tree may have some already."""

    parent: int
    num_children: int


class Candidates(NamedTuple):
    """The children that a node may get, most likely first (empty: unknown). ``confidence``: bucket of the first of them
    (specdec.speculation.acceptance). ``draft_probs``: what it was drawn from."""

    token_ids: tuple[int, ...] = ()
    confidence: int = 0
    draft_probs: SparseDistribution | None = None

    def below(self, parent: int, count: int) -> list[Candidate]:
        """The first ``count`` of them, as children of ``parent``."""
        return [
            Candidate(parent, token, self.draft_probs, confidence=self.confidence) for token in self.token_ids[:count]
        ]


@dataclass(slots=True)
class DraftSequence(Generic[State]):
    """A drafter's view of a sequence: the committed ids and the tree grown below the last of them.

    ``branches``: where a drafter with the capability "ahead" grows the tree in this pass, which may then branch; empty:
    below the last node. There ``num_wanted`` nodes are wanted, each below the one before, with ``num_siblings``
    siblings each. ``num_candidates``: children that a node gets at most.
    """

    spec: SequenceSpec
    ids: MutableSequence[int]
    tree: TokenTree = EMPTY_TREE
    state: State = None  # type: ignore[assignment]  # the engine opens it before the first pass
    branches: tuple[Branch, ...] = ()
    num_siblings: int = 0
    num_candidates: int = 1
    num_wanted: int = 1

    @property
    def base(self) -> int:
        return len(self.ids)

    @property
    def next_branches(self) -> Sequence[Branch]:
        """``branches``, or the last node."""
        return self.branches or (Branch(len(self.tree) - 1, 1 + self.num_siblings),)


class Drafter(Protocol[State]):
    """A method of drafting. Each has a file in draft_service/drafters/; its verbs are learn and grow."""

    info: ModelInfo

    def open(self, spec: SequenceSpec) -> State:
        """The state of a new sequence."""

    def close(self, state: State) -> None: ...

    def learn(self, sequences: Sequence[DraftSequence[State]]) -> Sequence[SpecdecError | bool]:
        """Feed the committed ids of all sequences in one pass.

        True: done; False: a long prompt continues in the next pass; an error ends that sequence only.
        """

    def grow(self, sequences: Sequence[DraftSequence[State]]) -> Sequence[Sequence[Candidate] | SpecdecError | None]:
        """The next nodes of each tree, in one pass; an empty list: nothing is likely enough to propose.

        First feeds the committed ids that are missing; None: that takes another pass. Without branches: a node below
        the last one, then its siblings if they are wanted, then perhaps a node below it, and so on. With branches: the
        children that they lack. Either all sequences have branches or none has. An error ends that sequence only.
        """

    def request_yield(self, requested: bool) -> None:
        """While requested, ``grow`` should return early, with one node. May be called from any thread, at any time."""

    def cache_use(self) -> tuple[int, int]:
        """KV slots used, and KV slots in total."""
