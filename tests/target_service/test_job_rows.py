"""Grammars that take long share the time of a pass, and cost other sequences a bounded part of it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from specdec.core.sequence import Method, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from target_service.job_rows import SLOW_ROW_S, SlowGrammars
from target_service.verifier import Job

EVERY = {0, 1, 2, 3}


def job(row_s: float, tree: TokenTree = EMPTY_TREE, method: Method = Method.COUPLED) -> Job:
    sampling = SimpleNamespace(transforms=SimpleNamespace(row_s=row_s))
    memory: Any = SimpleNamespace(sampling=sampling, num_held=0, spec=SequenceSpec((5,), 1, method=method))
    return Job(memory, (), tree)


def test_sequences_with_usual_grammars_or_none_are_in_every_pass() -> None:
    jobs, slow = [job(0.1), job(0.0), job(SLOW_ROW_S, TokenTree.chain([1] * 60)), job(0.1)], SlowGrammars()
    assert all({1, 2} <= slow.choose(jobs, EVERY, 0.01 * number) for number in range(9))


def test_slow_grammars_take_a_share_of_the_time_of_others_and_take_turns() -> None:
    jobs, slow = [job(0.02), job(0.02), job(0.0)], SlowGrammars()
    passes = [slow.choose(jobs, {0, 1, 2}, 0.01 * number) for number in range(200)]
    counts = [sum(index in chosen for chosen in passes) for index in range(3)]
    assert counts[2] == 200
    assert abs(counts[0] - counts[1]) <= 1
    assert 0.1 < (counts[0] + counts[1]) * 0.02 / 2.0 < 0.25
    assert max(len(chosen) for chosen in passes) == 2


def test_slow_grammars_alone_do_not_wait() -> None:
    jobs, slow = [job(0.2), job(0.2)], SlowGrammars()
    passes = [slow.choose(jobs, {0, 1}, 0.0) for _ in range(6)]
    assert all(passes)
    assert {index for chosen in passes for index in chosen} == {0, 1}


def test_a_tree_that_a_slow_grammar_has_no_time_for_is_not_verified() -> None:
    chain = TokenTree.chain([1] * 8)
    jobs = [job(0.004, chain), job(0.004, chain, Method.TOKEN), job(0.0, chain)]
    for number in range(2):
        SlowGrammars().choose(jobs, {number, 2}, 0.0)
    assert [len(each.tree) for each in jobs] == [0, 8, 8]  # what a chain of token verification costs does not decide
