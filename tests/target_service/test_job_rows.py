"""Grammars that take long share the time of a pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from specdec.core.tree import EMPTY_TREE
from target_service.job_rows import held_back
from target_service.verifier import Job


def job(mask_s: float) -> Job:
    transforms = SimpleNamespace(mask_s=lambda num_rows: mask_s * num_rows)
    memory: Any = SimpleNamespace(sampling=SimpleNamespace(transforms=transforms), num_held=0)
    return Job(memory, (), EMPTY_TREE)


def test_sequences_without_a_grammar_are_never_held_back() -> None:
    jobs = [job(1.0), job(0.0), job(0.0), job(1.0)]
    for _ in range(4):
        assert held_back(jobs, {0, 1, 2, 3}, 0.05) <= {0, 3}


def test_all_are_in_a_pass_that_has_time_for_them() -> None:
    assert held_back([job(0.01)] * 5, set(range(5)), 0.05 + 1e-9) == set()


def test_sequences_with_slow_grammars_take_turns_and_one_is_in_each_pass() -> None:
    jobs, passes = [job(0.2) for _ in range(4)], []
    for _ in range(8):
        passes.append({0, 1, 2, 3} - held_back(jobs, {0, 1, 2, 3}, 0.05))
    assert all(len(taken) == 1 for taken in passes)
    assert sorted(index for taken in passes for index in taken) == [0, 0, 1, 1, 2, 2, 3, 3]
