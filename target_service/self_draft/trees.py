"""Self-drafts: what a target drafts by itself, for all sequences of a pass at once.

A tree grows at its most likely nodes, of the tokens that a head says may follow. Knows trees and the chances of nodes;
does not know how a head computes its candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from specdec.backends.taps import Taps
from specdec.core.sequence import Draw
from specdec.core.tree import EMPTY_TREE, ROOT, Candidate, TokenTree
from specdec.kvcache.block_pool import SequenceCache
from specdec.passes.outputs import RowOutputs
from specdec.sampling.state import SamplingState
from specdec.speculation.acceptance import PRIOR, AcceptanceModel
from specdec.speculation.tree_growth import Frontier, Open
from target_service.self_draft.choices import RankTree, nodes_of
from target_service.verifier import Decision

NUM_CHILDREN = len(PRIOR)
"""Children of a node at most."""

_MAX_LEVELS = 16
"""Levels of a tree at most: each may take a pass of the head, for which all sequences of the pass wait."""

_PASS_ROWS = 1.0
"""A pass of a head costs hardly more than its rows, so a tree grows at its most likely nodes one after the other."""

StateT = TypeVar("StateT")
"""What a self-drafter or a head keeps of a sequence."""


class Candidates(NamedTuple):
    """What may follow a node: ``children``, the most likely first, and their confidence bucket (0: none)."""

    children: Sequence[int]
    confidence: int


NO_CANDIDATES = Candidates((), 0)


@dataclass(frozen=True, slots=True)
class DraftRequest(Generic[StateT]):
    """A self-draft that is wanted. The text ``ids`` is cached but for the last id."""

    state: StateT
    cache: SequenceCache
    sampling: SamplingState
    ids: Sequence[int]
    max_nodes: int


@dataclass(frozen=True, slots=True)
class Passed:
    """What a pass computed for one sequence, of which the text was ``ids``.

    ``start``: the position of the first row. ``taps`` [rows kept, taps * hidden_size]: the states of committed text and
    accepted nodes. ``outputs``: of the root and the nodes of ``tree``. ``decision``: None while a prefill continues.
    """

    cache: SequenceCache
    ids: Sequence[int]
    start: int
    taps: Tensor | None
    tree: TokenTree
    outputs: RowOutputs | None
    decision: Decision | None


class Learner(Protocol[StateT]):
    """What a self-drafter and a head have in common."""

    @property
    def kind(self) -> str:
        """Its name, such as eagle3."""

    @property
    def taps(self) -> Taps | None:
        """Of the states that it reads."""

    def open(self, salt: bytes) -> StateT:
        """The state of a new sequence. What is learnt of other sequences may come from those of the same salt alone:
        else times would tell their texts."""

    def learn(self, state: StateT, passed: Passed) -> None:
        """Take in a pass, whether it verified a self-draft or not."""

    def num_rows(self, state: StateT) -> int | None:
        """Rows of the text that are complete in the pool; None: all that the target has."""


class SelfDrafter(Learner[StateT], Protocol[StateT]):
    """What drafts for a target in its own process."""

    @property
    def num_nodes(self) -> int:
        """Nodes of every tree; 0: as many as asked for."""

    def grow(self, requests: Sequence[DraftRequest[StateT]]) -> list[TokenTree]:
        """A tree for each sequence, the same whatever the others are; empty where there is none."""


@dataclass(slots=True)
class GrowingDraft(Generic[StateT]):
    """A draft that a head grows. ``state``: the head's, of the sequence."""

    request: DraftRequest[Any]
    state: StateT
    frontier: Frontier | RankTree
    tree: TokenTree = EMPTY_TREE
    candidates: dict[int, Candidates] = field(default_factory=dict)  # by node
    states: dict[int, Tensor] = field(default_factory=dict)  # the head's, by node: [hidden_size]

    def add(self, children: Sequence[Open]) -> None:
        nodes = []
        for _, parent, rank in children:
            token_ids, confidence = self.candidates[parent]
            if rank < len(token_ids):
                nodes.append(Candidate(parent, token_ids[rank], confidence=confidence))
        if nodes:
            self.tree = self.tree.extended(nodes)
            self.frontier.grow(self.tree)


class Parent(NamedTuple, Generic[StateT]):
    """A node of a draft, or ROOT, of which the candidates are wanted."""

    draft: GrowingDraft[StateT]
    node: int

    @property
    def token(self) -> int:
        return self.draft.request.ids[-1] if self.node == ROOT else self.draft.tree.token_ids[self.node]

    @property
    def depth(self) -> int:
        """Of its children."""
        return 0 if self.node == ROOT else 1 + self.draft.tree.depths[self.node]

    @property
    def draw(self) -> Draw:
        """The target's own draw after this node."""
        return self.draft.request.sampling.draw(len(self.draft.request.ids) + self.depth)


class Head(Learner[StateT], Protocol[StateT]):
    """What knows candidates for the children of nodes."""

    def begin(self, drafts: Sequence[GrowingDraft[StateT]]) -> Sequence[GrowingDraft[StateT]]:
        """Prepare those that can be drafted for, and return these."""

    def candidates(self, parents: Sequence[Parent[StateT]]) -> Sequence[Candidates]:
        """Those of each node. Those of the nodes above are known."""

    def end(self, drafts: Sequence[GrowingDraft[StateT]]) -> None:
        """Release what ``begin`` took."""


@dataclass(slots=True)
class SelfDraftState(Generic[StateT]):
    chances: AcceptanceModel
    head_state: StateT


class SelfDraftTrees(Generic[StateT]):
    """Trees of a head's candidates."""

    num_nodes = 0

    def __init__(self, head: Head[StateT], choices: Sequence[Sequence[int]] = ()) -> None:
        """``choices``: of a static tree (see nodes_of); without them a tree grows where it is most likely."""
        self.head, self.kind, self.taps = head, head.kind, head.taps
        self._nodes = nodes_of(choices)
        self._chances = AcceptanceModel()

    def open(self, salt: bytes) -> SelfDraftState[StateT]:
        return SelfDraftState(AcceptanceModel(self._chances), self.head.open(salt))

    def num_rows(self, state: SelfDraftState[StateT]) -> int | None:
        return self.head.num_rows(state.head_state)

    def learn(self, state: SelfDraftState[StateT], passed: Passed) -> None:
        if passed.decision is not None and passed.decision.self_draft:
            state.chances.observe(passed.decision.self_draft, passed.decision.accepted, ended=True)
        self.head.learn(state.head_state, passed)

    @torch.inference_mode()
    def grow(self, requests: Sequence[DraftRequest[SelfDraftState[StateT]]]) -> list[TokenTree]:
        drafts = [self._growing(request) for request in requests]
        able = self.head.begin(drafts)
        try:
            self._find_candidates([Parent(draft, ROOT) for draft in able])
            while self._add_level(able):
                pass
        finally:
            self.head.end(able)
        return [draft.tree for draft in drafts]

    def _growing(self, request: DraftRequest[SelfDraftState[StateT]]) -> GrowingDraft[StateT]:
        rank_rates, max_depth = request.state.chances.at_confidence, min(request.max_nodes, _MAX_LEVELS)
        frontier = RankTree(self._nodes) if self._nodes else Frontier(rank_rates, EMPTY_TREE, max_depth)
        return GrowingDraft(request, request.state.head_state, frontier)

    def _add_level(self, drafts: Sequence[GrowingDraft[StateT]]) -> bool:
        """Add the next children to each tree. False: all trees are complete."""
        wanted = [draft.frontier.take(draft.request.max_nodes - len(draft.tree), _PASS_ROWS) for draft in drafts]
        parents: list[Parent[StateT]] = []
        for draft, children in zip(drafts, wanted, strict=True):
            nodes = dict.fromkeys(child.parent for child in children)
            parents += [Parent(draft, node) for node in nodes if node not in draft.candidates]
        self._find_candidates(parents)
        for draft, children in zip(drafts, wanted, strict=True):
            draft.add(children)
        return any(wanted)

    def _find_candidates(self, parents: Sequence[Parent[StateT]]) -> None:
        candidates = self.head.candidates(parents) if parents else ()
        for (draft, node), children in zip(parents, candidates, strict=True):
            draft.candidates[node] = children
