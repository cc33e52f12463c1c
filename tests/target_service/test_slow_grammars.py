"""Grammars that take long share the time of a pass, and cost other sequences a bounded part of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from specdec.core.rounds import TargetOpen
from specdec.core.sequence import Method, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from target_service.slow_grammars import SLOW_ROW_S, SlowGrammars
from target_service.tasks import Task
from target_service.verifier import Job


def task(row_s: float, tree: TokenTree = EMPTY_TREE, method: Method = Method.COUPLED) -> Task:
    spec = SequenceSpec((5,), 1, method=method)
    sampling = SimpleNamespace(transforms=SimpleNamespace(row_s=row_s), spec=spec)
    state: Any = SimpleNamespace(sampling=sampling, num_missed=0)
    return Task(Job(TargetOpen(spec), state, (), tree))


def test_sequences_with_usual_grammars_or_none_are_in_every_pass() -> None:
    tasks, slow = [task(0.1), task(0.0), task(SLOW_ROW_S, TokenTree.chain([1] * 60)), task(0.1)], SlowGrammars()
    assert all({*tasks[1:3]} <= {*slow.choose(tasks, 0.01 * number)} for number in range(9))


def test_slow_grammars_take_a_share_of_the_time_of_others_and_take_turns() -> None:
    tasks, slow = [task(0.02), task(0.02), task(0.0)], SlowGrammars()
    passes = [slow.choose(tasks, 0.01 * number) for number in range(200)]
    counts = [sum(one in chosen for chosen in passes) for one in tasks]
    assert counts[2] == 200
    assert abs(counts[0] - counts[1]) <= 1
    assert 0.1 < (counts[0] + counts[1]) * 0.02 / 2.0 < 0.25
    assert max(len(chosen) for chosen in passes) == 2


def test_slow_grammars_alone_do_not_wait() -> None:
    tasks, slow = [task(0.2), task(0.2)], SlowGrammars()
    passes = [slow.choose(tasks, 0.0) for _ in range(6)]
    assert all(passes)
    assert {one for chosen in passes for one in chosen} == {*tasks}


def test_a_tree_that_a_slow_grammar_has_no_time_for_is_not_verified() -> None:
    chain = TokenTree.chain([1] * 8)
    tasks = [task(0.004, chain), task(0.004, chain, Method.TOKEN), task(0.0, chain)]
    for number in range(2):
        SlowGrammars().choose([tasks[number], tasks[2]], 0.0)
    assert [len(one.tree) for one in tasks] == [0, 8, 8]  # what a chain of token verification costs does not decide
