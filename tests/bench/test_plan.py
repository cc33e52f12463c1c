"""bench plan measures deployments and predicts them; how near they come is what the command itself shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.plan import LOAD, Cell, Row, cells, deployed, table, tokens_per_s
from specdec.planner.deployment import ALIKE, Paths


def test_an_error_is_that_of_the_prediction():
    row = Row(Cell(LOAD, 1, 20.0, "K = 4"), measured=100.0, predicted=110.0)
    assert row.error == pytest.approx(0.1)
    assert table([row]).row_count == 1


def test_every_cell_is_predicted_and_messages_make_it_slower():
    for cell in cells():
        # What is chosen drafts least among those that are alike.
        share = ALIKE if cell.drafting == "chosen" else 1.0
        assert share * cell.predicted(Paths(0.0, 1e-3, 1e-4), 160) <= cell.predicted(Paths(), 160)


@pytest.mark.slow
async def test_a_cell_is_measured():
    costs = replace(LOAD, pass_ms=3.0, step_ms=0.5)
    async with deployed(costs) as running:
        for cell in (Cell(costs, 2, 2.0, "K = 4 ahead"), Cell(costs, 3, 0.0, "chosen")):
            assert 0 < await tokens_per_s(running, cell, 10, repeats=1) < 1e4
            assert {faults.latency_s for faults in running.proxy.faults.values()} == {cell.round_trip_ms / 2e3}
