"""One sequence of the target's engine: its committed ids, and the rounds that wait. Does not know passes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specdec.core.rounds import Round, TargetOpen
from specdec.core.sequence import Priority
from specdec.core.tree import EMPTY_TREE, TokenTree
from target_service.verifier import MAX_SELF_DRAFT_NODES, Job


@dataclass(slots=True)
class OpenSequence:
    open: TargetOpen
    state: Any  # the verifier's; None: it was lost in a pass that raised
    ids: array[int]
    arrived: float  # arrival time of its request; later by what its priority is behind
    since: float  # start of its present or last wait
    pending: Round | None = None
    early: Round | None = None  # the round after ``pending``, sent before the verdict
    tree: TokenTree = EMPTY_TREE  # the part of the pending round's tree that still matches the text
    nodes: Sequence[int] = ()  # the index of each node of ``tree`` in the tree as it was sent
    num_autonomous: int = 0  # autonomous tokens that are still allowed
    self_draft_nodes: int = 0  # at most, of a self-draft, where there is no other tree
    last: int = 0  # the last answered round
    paused: bool = False  # under backpressure

    @property
    def base(self) -> int:
        return len(self.ids)

    @property
    def waits(self) -> bool:
        return self.pending is not None or (self.num_autonomous > 0 and not self.paused)

    @property
    def is_batch(self) -> bool:
        return self.open.spec.priority is Priority.BATCH

    @property
    def leaves(self) -> bool:
        """Whether it is in no pass after the next one until another round arrives."""
        num_more = self.num_autonomous - 1 if self.pending is None else self.pending.num_autonomous
        return num_more <= 0 and self.early is None

    @property
    def num_rows(self) -> int:
        """Rows that it takes in a pass at most, besides its prompt."""
        return 1 + (len(self.tree) or self.self_draft_nodes)

    @property
    def num_rows_and_prompt(self) -> int:
        """The same, as if nothing of its prompt were cached."""
        opens = self.pending is not None and not self.pending.number
        return self.num_rows + (len(self.ids) if opens else 0)

    @property
    def job(self) -> Job[Any]:
        self_draft_nodes = 0 if self.tree else self.self_draft_nodes
        return Job(self.open, self.state, self.ids, tree=self.tree, self_draft_nodes=self_draft_nodes)

    def begin(self, round_: Round) -> None:
        """Make ``round_`` the pending one, its tree reduced to the part below the present base."""
        self.pending, self.num_autonomous = round_, 0
        self.self_draft_nodes = min(round_.self_draft_nodes, MAX_SELF_DRAFT_NODES)
        node = round_.tree.walk(self.ids[round_.base :])
        self.tree, self.nodes = (EMPTY_TREE, ()) if node is None else round_.tree.below(node)
        if round_.max_nodes:
            self.tree = self.tree.prefix(round_.max_nodes)

    def answered(self) -> None:
        """No round is pending any more."""
        self.pending, self.tree, self.nodes = None, EMPTY_TREE, ()
