"""What a draft service is built around: something that proposes, and what it sees of a sequence. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from specdec.core.errors import SpecdecError
from specdec.core.rounds import ModelInfo
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import EMPTY_TREE, SparseDistribution, TokenTree


class Spot(NamedTuple):
    """A node, or ROOT, that is to have its likeliest children; some of them may be there already."""

    parent: int
    num_children: int


@dataclass(frozen=True, slots=True)
class Node:
    """A proposal: the child ``token_id`` of node ``parent`` (-1: the root) of the sequence's tree. ``sure``: see
    specdec.core.tree.TokenTree."""

    parent: int
    token_id: int
    draft_probs: SparseDistribution | None = None
    confidence: int = 0


@dataclass(slots=True)
class DraftSequence:
    """What a drafter sees of a sequence: the committed ids and the tree grown below the last of them.

    ``spots`` is where a drafter with the capability "ahead" grows it in this pass, if not just at its last node: then
    the tree may branch. ``num_siblings`` runners-up are wanted beside the node below the last one, and no spot will
    have more than ``num_guesses`` children. ``num_wanted`` nodes are wanted below the last one, each below the other.
    """

    spec: SequenceSpec
    ids: list[int]
    tree: TokenTree = EMPTY_TREE
    memory: Any = None  # the drafter's own
    spots: tuple[Spot, ...] = ()
    num_siblings: int = 0
    num_guesses: int = 1
    num_wanted: int = 1

    @property
    def base(self) -> int:
        return len(self.ids)


class Drafter(Protocol):
    """A method of proposing. Each has a file in draft_service/drafters/ and two verbs beside open and close."""

    info: ModelInfo

    def open(self, spec: SequenceSpec) -> Any:
        """The memory of a new sequence."""

    def close(self, memory: Any) -> None: ...

    def learn(self, sequences: Sequence[DraftSequence]) -> Sequence[SpecdecError | bool]:
        """Take in what was committed, for all of them in one pass. An error ends its sequence alone.

        False: a long prompt goes on in the next pass.
        """

    def grow(self, sequences: Sequence[DraftSequence]) -> Sequence[Sequence[Node] | SpecdecError | None]:
        """The next nodes of each tree, in one pass; none: there is nothing likely to propose.

        Takes in what was committed first where that was not done. None: that takes another pass. Without spots, one
        node below the last, and after it its siblings if they are wanted, then perhaps one below that, and so on;
        with spots (all of them have some, or none
        has), the children that they lack.
        """

    def request_yield(self, requested: bool) -> None:
        """Whether of several nodes at once one will do. From any thread, also during ``grow``."""

    def cache_use(self) -> tuple[int, int]:
        """KV slots taken and in total."""
