"""Batch requests at a target: as much of a pass as lengthens it by an eighth, never the oldest, never starved."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from specdec.core.rounds import Round, TargetOpen, Verdict
from specdec.core.sequence import Priority, SequenceSpec
from specdec.server.step_loop import Key
from specdec.server.turns import AGED_S
from target_service.batch_share import BatchShare
from target_service.engine import TargetEngine
from testing.table_model import Table, TableVerifier

INTERACTIVE, STANDARD, BATCH = Priority


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Timed(TableVerifier):
    """A pass takes ``fixed_s`` and ``row_s`` per row of a clock that stands still otherwise."""

    def __init__(self, clock: Clock, fixed_s: float, row_s: float, num_slots: int = 1 << 20) -> None:
        super().__init__(Table(), num_slots=num_slots)
        self._times = clock, fixed_s, row_s

    def verify(self, jobs):
        decisions, timings = super().verify(jobs)
        clock, fixed_s, row_s = self._times
        clock.now += fixed_s + row_s * timings.rows
        return decisions, timings


def _engine(
    num_batch: int, num_others: int, row_s: float, others: Priority = INTERACTIVE
) -> tuple[TargetEngine, Clock]:
    clock = Clock()
    engine = TargetEngine(Timed(clock, 0.02, row_s), clock=clock)
    for number in range(num_batch + num_others):
        priority = others if number >= num_batch else BATCH
        engine.open(Key(1, number), TargetOpen(SequenceSpec((1, number), 2, priority=priority)))
    return engine, clock


def _rounds(engine: TargetEngine, count: int) -> Iterator[dict[Key, Verdict]]:
    """The verdicts of each pass. Every sequence asks for the next one at once."""
    for _ in range(count):
        verdicts = dict(engine.step())
        yield verdicts
        for key, verdict in verdicts.items():
            engine.submit(key, Round(verdict.round + 1, verdict.base + 1 + len(verdict.accepted)))


@pytest.mark.parametrize("others", [INTERACTIVE, STANDARD])
def test_batch_rows_lengthen_the_passes_of_others_by_an_eighth_at_most_and_use_all_of_it(others):
    engine, clock = _engine(200, 8, row_s=20e-6, others=others)
    for _ in _rounds(engine, 20):
        pass
    started, num_batch, num_others = clock.now, 0, 0
    for verdicts in _rounds(engine, 100):
        num_batch += sum(key.sequence < 200 for key in verdicts)
        num_others += sum(key.sequence >= 200 for key in verdicts)
    alone_s = 0.02 + 8 * 20e-6
    per_token_s = (clock.now - started) / 100
    assert num_others == 800, "they are in every pass"
    assert 1.10 * alone_s < per_token_s < 1.15 * alone_s
    assert num_batch / (clock.now - started) > 0.6 * 200 / (0.02 + 200 * 20e-6)


def test_no_batch_request_starves_where_rows_are_dear():
    engine, clock = _engine(50, 8, row_s=0.01)
    last = {Key(1, number): 0.0 for number in range(50)}
    for verdicts in _rounds(engine, 600):
        for key in verdicts:
            if key in last:
                assert clock.now - last[key] < AGED_S + 1.0
                last[key] = clock.now
    assert min(last.values()) > clock.now - AGED_S - 1.0


def test_batch_requests_alone_have_all_of_the_passes():
    engine, _ = _engine(50, 0, row_s=0.01)
    assert all(len(verdicts) == 50 for verdicts in _rounds(engine, 20))


def test_rows_that_cost_nothing_are_not_left_out():
    engine, _ = _engine(50, 8, row_s=0.0)
    assert all(len(verdicts) == 58 for verdicts in _rounds(engine, 20))


def test_memory_goes_to_others_first_and_a_batch_request_is_preempted_first():
    clock = Clock()
    engine = TargetEngine(Timed(clock, 0.02, 0.0, num_slots=70), clock=clock)
    batch, other = Key(1, 1), Key(1, 2)
    engine.open(batch, TargetOpen(SequenceSpec((1, 2), 2, priority=BATCH), age_s=10.0))
    engine.open(other, TargetOpen(SequenceSpec((1, 3), 2)))
    ended = [key for verdicts in _rounds_until_preempted(engine) for key in verdicts]
    assert ended == [batch], "although its request is older"


def _rounds_until_preempted(engine: TargetEngine) -> Iterator[list[Key]]:
    for _ in range(100):
        results = engine.step()
        if lost := [key for key, result in results if not isinstance(result, Verdict)]:
            yield lost
            return
        for key, verdict in results:
            engine.submit(key, Round(verdict.round + 1, verdict.base + 1))


def test_what_a_row_costs_is_kept_while_passes_are_alike():
    share = BatchShare()
    for _ in range(10):
        for rows in (10, 110):
            share.observe_pass(rows, 0.02 + 1e-4 * rows, with_others=True)
    assert share.row_s == pytest.approx(1e-4)
    for number in range(1000):
        share.observe_pass(110 + number % 2, 0.031 + 1e-4 * (number % 3), with_others=True)
    assert share.row_s == pytest.approx(1e-4, rel=0.2)
