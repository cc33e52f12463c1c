"""Self-drafts: what a target drafts by itself, for all sequences of a pass at once.

A tree grows at its likeliest places, of the tokens that a head says may follow. Knows trees and the chances of nodes;
does not know how a head computes its guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from specdec.backends.taps import Taps
from specdec.core.tree import EMPTY_TREE, ROOT, Candidate, TokenTree
from specdec.kvcache.block_pool import SequenceCache
from specdec.passes.outputs import RowOutputs
from specdec.sampling.state import SamplingState
from specdec.speculation.acceptance import PRIOR, AcceptanceModel
from specdec.speculation.tree_growth import Frontier
from target_service.self_draft.choices import RankTree, nodes_of
from target_service.verifier import Decision

NUM_CHILDREN = len(PRIOR)
"""Children of a node at most."""

_MOST_LEVELS = 16
"""Levels of a tree at most: each may take a pass of the head, for which all sequences of the pass wait."""

_PASS_ROWS = 1.0
"""A pass of a head costs hardly more than its rows, so a tree grows at its likeliest places one after the other."""


class Guesses(NamedTuple):
    """What may follow a node: ``children``, the likeliest first, and their confidence bucket (0: none)."""

    children: Sequence[int]
    confidence: int


NO_GUESSES = Guesses((), 0)


@dataclass(slots=True)
class Growing:
    """The drafting of one sequence. Its text ``ids`` is cached but for the last id. ``memory``: of SelfDrafter.open."""

    memory: Any
    cache: SequenceCache
    sampling: SamplingState
    ids: Sequence[int]
    max_nodes: int
    tree: TokenTree = EMPTY_TREE
    guesses: dict[int, Guesses] = field(default_factory=dict)  # by node
    states: dict[int, Tensor] = field(default_factory=dict)  # the head's own, by node: [hidden_size]

    def token(self, node: int) -> int:
        """The token at a node."""
        return self.ids[-1] if node == ROOT else self.tree.token_ids[node]

    def position(self, node: int) -> int:
        """The position of a node's children."""
        return len(self.ids) + (0 if node == ROOT else 1 + self.tree.depths[node])


@dataclass(frozen=True, slots=True)
class Passed:
    """What a pass computed for one sequence, of which the text was ``ids``.

    ``start``: the position of the first row. ``taps`` [rows kept, taps * hidden_size]: the states of committed text and
    accepted nodes. ``outputs``: of the root and the nodes of ``tree``. ``decision``: None while a prefill continues.
    """

    memory: Any
    cache: SequenceCache
    ids: Sequence[int]
    start: int
    taps: Tensor | None
    tree: TokenTree
    outputs: RowOutputs | None
    decision: Decision | None


class SelfDrafter(Protocol):
    """What drafts beside a target."""

    @property
    def kind(self) -> str:
        """Its name, such as eagle3."""

    @property
    def num_nodes(self) -> int:
        """Nodes of every tree; 0: as many as asked for."""

    @property
    def taps(self) -> Taps | None:
        """Of the states that it reads."""

    def open(self, salt: bytes) -> Any:
        """The memory of a new sequence. What is learnt of other sequences may come from those of the same salt alone:
        else times would tell their texts."""

    def learn(self, passed: Passed) -> None:
        """Take in a pass, whether it verified a self-draft or not."""

    def grow(self, growing: Sequence[Growing]) -> list[TokenTree]:
        """A tree for each sequence, the same whatever the company; empty where there is none."""

    def num_rows(self, memory: Any) -> int | None:
        """Rows of the text that are complete in the pool; None: all that the target has."""


class Head(Protocol):
    """What guesses the children of nodes. Of every ``memory`` it knows ``of_head``, which it opened."""

    @property
    def kind(self) -> str: ...

    @property
    def taps(self) -> Taps | None: ...

    def open(self, salt: bytes) -> Any: ...

    def learn(self, passed: Passed) -> None: ...

    def num_rows(self, memory: SelfDraftState) -> int | None: ...

    def begin(self, growing: Sequence[Growing]) -> Sequence[Growing]:
        """Prepare the drafting of those that can be drafted for, and return these."""

    def guess(self, places: Sequence[tuple[Growing, int]]) -> Sequence[Guesses]:
        """The guesses at nodes. Those of their parents are known."""

    def end(self, growing: Sequence[Growing]) -> None:
        """Release what ``begin`` took."""


@dataclass(slots=True)
class SelfDraftState:
    """``of_head``: what the head knows of the sequence."""

    chances: AcceptanceModel
    of_head: Any


class SelfDraftTrees:
    """Trees of a head's guesses."""

    num_nodes = 0

    def __init__(self, head: Head, choices: Sequence[Sequence[int]] = ()) -> None:
        """``choices``: of a static tree (see nodes_of); without them a tree grows where it is likeliest."""
        self.head, self.kind, self.taps = head, head.kind, head.taps
        self._nodes = nodes_of(choices)
        self._chances = AcceptanceModel()

    def open(self, salt: bytes) -> SelfDraftState:
        return SelfDraftState(AcceptanceModel(self._chances), self.head.open(salt))

    def num_rows(self, memory: SelfDraftState) -> int | None:
        return self.head.num_rows(memory)

    def learn(self, passed: Passed) -> None:
        memory: SelfDraftState = passed.memory
        if passed.decision is not None and passed.decision.self_draft:
            memory.chances.observe(passed.decision.self_draft, passed.decision.accepted, ended=True)
        self.head.learn(passed)

    @torch.inference_mode()
    def grow(self, growing: Sequence[Growing]) -> list[TokenTree]:
        able = self.head.begin(growing)
        try:
            self._guess([(each, ROOT) for each in able])
            places = [self._places(each) for each in able]
            while self._add_level(able, places):
                pass
        finally:
            self.head.end(able)
        return [each.tree for each in growing]

    def _places(self, each: Growing) -> Frontier | RankTree:
        if self._nodes:
            return RankTree(self._nodes)
        return Frontier(each.memory.chances.at_confidence, each.tree, min(each.max_nodes, _MOST_LEVELS))

    def _add_level(self, growing: Sequence[Growing], places: Sequence[Frontier | RankTree]) -> bool:
        """Add the next children to each tree, after guessing those of their parents. False: all trees are complete."""
        wanted: list[list[tuple[int, int]]] = []
        lacking: list[tuple[Growing, int]] = []
        for each, open_places in zip(growing, places, strict=True):
            opens = open_places.take(each.max_nodes - len(each.tree), _PASS_ROWS)
            wanted.append([(found.parent, found.rank) for found in opens])
            parents = dict.fromkeys(found.parent for found in opens)
            lacking += [(each, parent) for parent in parents if parent not in each.guesses]
        if lacking:
            self._guess(lacking)
        for each, open_places, children_wanted in zip(growing, places, wanted, strict=True):
            new = []
            for parent, rank in children_wanted:
                children, confidence = each.guesses[parent]
                if rank < len(children):
                    new.append(Candidate(parent, children[rank], confidence=confidence))
            if new:
                each.tree = each.tree.extended(new)
                open_places.grow(each.tree)
        return any(wanted)

    def _guess(self, places: Sequence[tuple[Growing, int]]) -> None:
        for (each, node), guesses in zip(places, self.head.guess(places) if places else (), strict=True):
            each.guesses[node] = guesses
