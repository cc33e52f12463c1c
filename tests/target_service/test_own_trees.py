"""A tree that a target drafts by itself grows where a node is likelier than what it takes of a pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import TokenTree
from specdec.sampling.state import SamplingState
from specdec.speculation.acceptance import PRIOR
from target_service.own import own_trees
from target_service.own.own_trees import Growing, Guesses, OwnTrees, Passed
from target_service.verifier import Decision

NOTHING: Any = None
PASS_S = 10.0


class Clock:
    """Time that passes where a test says so."""

    def __init__(self) -> None:
        self.now = 1.0

    def perf_counter(self) -> float:
        return self.now


class SlowHead:
    """Guesses two children of each node, in ``seconds`` for a level."""

    kind, taps = "slow", None

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def open(self, salt: bytes) -> None: ...

    def num_rows(self, memory: Any) -> None: ...

    def learn(self, passed: Passed) -> None: ...

    def begin(self, growing: Sequence[Growing]) -> Sequence[Growing]:
        return growing

    def guess(self, places: Sequence[tuple[Growing, int]]) -> list[Guesses]:
        self._clock.now += self._seconds
        return [Guesses((3, 4), 0) for _ in places]

    def end(self, growing: Sequence[Growing]) -> None: ...


def trees(monkeypatch: pytest.MonkeyPatch, seconds: float, choices: Sequence[Sequence[int]] = ()) -> list[TokenTree]:
    """Those of three rounds, of 12 nodes at most."""
    clock = Clock()
    monkeypatch.setattr(own_trees, "time", clock)
    own = OwnTrees(SlowHead(clock, seconds), choices)
    memory, found = own.open(b""), []
    sampling = SamplingState(SequenceSpec([1, 2], 2, SamplingParams(0.0), 1, Method.COUPLED))
    for _ in range(3):
        [tree] = own.grow([Growing(memory, NOTHING, sampling, [1, 2], 12)])
        clock.now += PASS_S
        decision = Decision((), 5, own=tree)
        own.learn(Passed(memory, NOTHING, [1, 2], 1, None, tree, None, decision))
        found.append(tree)
    return found


def test_a_node_that_is_less_likely_than_what_it_takes_of_a_pass_is_left_out(monkeypatch: pytest.MonkeyPatch):
    first, *others = trees(monkeypatch, seconds=0.4 * PASS_S)
    assert len(first) == 12, "nothing is known yet"
    assert PRIOR[0] > 0.4 > PRIOR[0] ** 3
    assert [len(tree) for tree in others] == [1, 1]


def test_guesses_that_take_no_time_fill_the_tree(monkeypatch: pytest.MonkeyPatch):
    assert [len(tree) for tree in trees(monkeypatch, seconds=0.0)] == [12] * 3


def test_a_static_tree_is_always_whole(monkeypatch: pytest.MonkeyPatch):
    choices = [[0], [0, 0], [0, 0, 0], [1]]
    assert [len(tree) for tree in trees(monkeypatch, seconds=5 * PASS_S, choices=choices)] == [4] * 3
