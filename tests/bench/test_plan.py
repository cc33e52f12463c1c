"""bench plan measures a deployment and simulates it; how near they come is what the command itself shows."""

from __future__ import annotations

import pytest
from bench.micro.pass_cost import draft_step_time, target_pass_time
from specdec.planner.scenario import Pair, Paths

from bench.plan import Cell, Models, Row, Speed, _lab, _rounds, _simulated, _table, _tokens


def test_a_miss_is_how_far_the_simulation_is_off():
    row = Row(Cell(1, 4, True, 20.0, 10), measured=Speed(100.0, 20.0), simulated=Speed(110.0, 15.0))
    assert row.misses == (pytest.approx(0.1), pytest.approx(-0.25))
    assert _table([row]).row_count == 1


def test_few_streams_are_measured_for_longer():
    assert _tokens(10, 0, 0.8) == 10
    assert _tokens(10, 1, 0.8) == 18
    assert _rounds(10, 1, 4) > _rounds(10, 4, 4) >= _rounds(10, 64, 4) == 10


def test_a_pass_takes_at_least_its_sleep_and_more_rows_no_less():
    for times, many in ((target_pass_time(0.002), 320), (draft_step_time(0.002), 64)):
        assert 0.002 <= times.seconds(1) <= times.seconds(many)


@pytest.mark.slow
async def test_a_cell_is_measured_and_simulated():
    models = Models(3.0, 0.5, 0.8)
    async with _lab(models) as lab:
        for cell in (Cell(2, 4, True, 2.0, 10), Cell(3, 0, False, 0.0, 10)):
            measured = await lab.measure(cell, repeats=2)
            assert measured.tokens_per_s > 0
            assert measured.ms_per_token > 0
            latencies = {faults.latency_s for faults in lab.proxy.faults.values()}
            assert latencies == {cell.round_trip_ms / 2e3}
        assert await lab.seconds_per_round(Cell(1, 4, False, 0.0, 10)) >= 0.003
    pair = Pair(target_pass_time(0.003), draft_step_time(0.0005), 0.8)
    simulated = _simulated(Cell(1, 0, False, 0.0, 20), pair, Paths(0.0, 0.001, 0.0))
    assert simulated.ms_per_token == pytest.approx((pair.target.seconds(1) + 0.001 / 19) * 1e3)
