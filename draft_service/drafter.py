"""The interface of a drafter, and its view of a sequence. Imports no torch."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from specdec.core.errors import SpecdecError
from specdec.core.rounds import ModelInfo
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import EMPTY_TREE, SparseDistribution, TokenTree


class Spot(NamedTuple):
    """A node (or ROOT) that is to get its ``num_children`` likeliest children; the tree may have some already."""

    parent: int
    num_children: int


@dataclass(frozen=True, slots=True)
class Node:
    """A proposal: the child ``token_id`` of node ``parent`` (-1: the root) of the sequence's tree. ``confidence``: see
    specdec.core.tree.TokenTree."""

    parent: int
    token_id: int
    draft_probs: SparseDistribution | None = None
    confidence: int = 0


@dataclass(slots=True)
class DraftSequence:
    """A drafter's view of a sequence: the committed ids and the tree grown below the last of them.

    ``spots``: where a drafter with the capability "ahead" grows the tree in this pass, which may then branch; empty:
    below the last node. There ``num_wanted`` nodes are wanted, each below the one before, with ``num_siblings``
    runners-up beside each. ``num_guesses``: children that a node gets at most.
    """

    spec: SequenceSpec
    ids: MutableSequence[int]
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
    """A method of drafting. Each has a file in draft_service/drafters/; its verbs are learn and grow."""

    info: ModelInfo

    def open(self, spec: SequenceSpec) -> Any:
        """The memory of a new sequence."""

    def close(self, memory: Any) -> None: ...

    def learn(self, sequences: Sequence[DraftSequence]) -> Sequence[SpecdecError | bool]:
        """Feed the committed ids of all sequences in one pass.

        True: done; False: a long prompt continues in the next pass; an error ends that sequence only.
        """

    def grow(self, sequences: Sequence[DraftSequence]) -> Sequence[Sequence[Node] | SpecdecError | None]:
        """The next nodes of each tree, in one pass; an empty list: nothing is likely enough to propose.

        First feeds the committed ids that are missing; None: that takes another pass. Without spots: a node below the
        last one, then its siblings if they are wanted, then perhaps a node below it, and so on. With spots: the
        children that they lack. Either all sequences have spots or none has. An error ends that sequence only.
        """

    def request_yield(self, requested: bool) -> None:
        """While requested, ``grow`` should return early, with one node. May be called from any thread, at any time."""

    def cache_use(self) -> tuple[int, int]:
        """KV slots used, and KV slots in total."""
