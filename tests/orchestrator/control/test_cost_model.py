"""What passes cost: any shape that was measured of late, and none of it by accident."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from orchestrator.control.cost_model import CostModel
from orchestrator.rounds import Exchange, RoundRecord
from specdec.core.rounds import Timings


def knee_ms(rows: int) -> float:
    return 20.0 * max(1.0, rows / 8)


def after(passes: Iterable[tuple[int, float]], sequences: int = 1) -> CostModel:
    """The costs after passes of so many rows and milliseconds, which all their sequences report."""
    costs = CostModel()
    for rows, milliseconds in passes:
        timings = Timings(pass_us=int(1e3 * milliseconds), rows=rows, sequences=sequences)
        for _ in range(sequences):
            costs.observe(RoundRecord(1, 5, timings=timings, exchange=Exchange()))
    return costs


def test_a_pass_with_a_knee_is_known_on_both_sides_of_it():
    """No line is near all of these."""
    chance = random.Random(1)
    rows = [4, 8, 12, 24, 40, 24, 40] * 20
    costs = after((number, knee_ms(number) * chance.lognormvariate(0, 0.03)) for number in rows)
    for number in sorted(set(rows)):
        assert 1e3 * costs.target_s(number) == pytest.approx(knee_ms(number), rel=0.06)
    assert knee_ms(12) < 1e3 * costs.target_s(16) < knee_ms(24)


def test_where_time_grows_in_proportion_a_line_goes_beyond_what_was_measured():
    costs = after((rows, 10 + 0.5 * rows) for rows in [1, 4, 9, 2] * 20)
    assert 1e3 * costs.target_s(40) == pytest.approx(30, rel=0.05)


def test_a_slow_pass_is_an_accident_however_many_sequences_report_it():
    usual = [(16, 20.0 + number % 2) for number in range(40)]
    assert after([*usual, (16, 100.0)], sequences=16).alone_s == pytest.approx(0.02, rel=0.1)
    slower = [(16, 100.0 + number) for number in range(40)]
    assert after([*usual, *slower], sequences=16).alone_s == pytest.approx(0.12, rel=0.2), "it stays so slow"


def test_what_was_measured_long_ago_is_forgotten():
    """Else a number of draft tokens that was slow once would never be tried again."""
    costs = after([*((8, 20.0) for _ in range(10)), (16, 60.0), (16, 60.0), *((8, 20.0) for _ in range(600))])
    assert costs.target_s(16) < 0.055
