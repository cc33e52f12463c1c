"""What bench distance makes of its rows, and that all modes of its deployment generate the target's text."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bench.distance.__main__ import cases_of, main, rows_of, tables, three_ids
from bench.distance.formula import predictions
from bench.distance.lab import TableCosts, lab, served_tables
from bench.distance.modes import ADAPTIVE, AHEAD, ALONE, Mode, sync
from bench.distance.row import Outcomes, Row, Run
from bench.distance.situations import ROUND_TRIPS_MS, Situation, situations
from bench.harness import runner
from bench.harness.command import Common
from bench.harness.runner import Answer, Results, measure
from specdec.v1.generation_pb2 import SpeculationStats
from tests.checkout import DEMO

TOLD = SpeculationStats(
    num_rounds=5,
    num_drafts=4,
    num_draft_tokens=12,
    num_accepted_tokens=6,
    num_bonuses=1,
    num_bonus_hits=1,
    num_corrections_per_pos=[1, 1],
    num_correction_hits_per_pos=[0, 1],
    num_drafts_on_time=3,
    num_received_nodes=32,
    elapsed_us=40_000,
    draft_wait_us=4_000,
    target_queue_us=800,
    target_pass_us=24_000,
    target_sample_us=3_200,
)


def test_a_row_is_the_median_speed_and_the_sum_of_the_statistics():
    other = SpeculationStats(num_rounds=5, num_corrections_per_pos=[0, 0, 2], num_correction_hits_per_pos=[0, 0, 1])
    runs = [Run(10, 1.0, (TOLD,)), Run(10, 2.0, (other,)), Run(10, 5.0, ())]
    row = Row.of("table", 0.0, "0 ms", 0.0, "ahead", runs)
    assert (row.tokens_per_s, row.on_time, row.drafts_per_round) == (5.0, 0.75, 0.4)
    assert (row.draft_tokens_per_round, row.accepted_per_round, row.tokens_per_round) == (1.2, 0.6, 3.0)
    assert row.outcomes == Outcomes(1, 1, (1, 1, 2), (0, 1, 1))
    assert (row.outcomes.bonus_hits, row.outcomes.correction_hits, row.outcomes.hits) == (1.0, 0.5, 0.6)
    assert row.outcomes.firsts == 0.8
    spent = row.round_ms
    parts = (spent.draft_wait, spent.target_queue, spent.target_pass, spent.target_sample, spent.rest)
    assert parts == pytest.approx((0.5, 0.1, 3.0, 0.4, 1.0)), "over eight rounds, the first of either not counted"
    row = Row.of("table", 0.0, "0 ms", 0.0, "alone", [Run(3, 1.0, (SpeculationStats(num_rounds=3),))])
    assert (row.on_time, row.outcomes.hits, row.outcomes.bonus_hits, row.outcomes.correction_hits) == (None,) * 4


def measured(plan: list[Situation]) -> Results:
    """All modes of a plan with the same figures."""
    run = runner.Run(1.0, [Answer([0] * 10, stats=TOLD)])
    return Results([runner.Row(each.name, mode.name, [run]) for each in plan for mode in each.modes])


@pytest.mark.parametrize("with_unrelated", [False, True])
def test_every_mode_is_measured_at_every_distance(with_unrelated: bool):
    plan = situations([0.0, 1.0], quick=False, with_unrelated=with_unrelated)
    for temperature in (0.0, 1.0):
        distances = [each for each in plan if each.temperature == temperature and each.round_trip_ms is not None]
        assert [each.round_trip_ms for each in distances] == list(ROUND_TRIPS_MS)
        for each in distances:
            names = [mode.name for mode in each.modes]
            assert names == ["alone", *(sync(number).name for number in (4, 6, 8)), "sync, adaptive", "ahead"]
    others = [each.place for each in plan if each.round_trip_ms is None]
    assert others == ["32 requests", *(["unrelated"] if with_unrelated else []), "gone"]
    assert len({each.name for each in plan}) == len(plan)


def test_one_temperature_can_be_measured_alone():
    whole = situations([0.0, 1.0], quick=False)
    for temperature in (0.0, 1.0):
        plan = situations([temperature], quick=False)
        assert plan == [each for each in whole if each.temperature == temperature]


def test_the_quick_plan_has_all_that_the_formula_needs():
    plan = situations([0.0, 1.0], quick=True)
    predicted = predictions(rows_of(measured(plan), plan, "table"))
    assert {(each.temperature, each.mode) for each in predicted} == {
        *((0.0, name) for name in ("alone", "sync, K = 4", "sync, K = 6", "sync, K = 8", "sync, adaptive", "ahead")),
        *((1.0, name) for name in ("alone", "sync, K = 6", "ahead")),
    }


def test_the_tables_have_a_line_per_row_and_fit_a_terminal():
    plan = situations([0.0, 1.0], quick=True, with_unrelated=True)
    results = measured(plan)
    shown = StringIO()
    for table in tables(results, rows_of(results, plan, "table")).values():
        assert table.row_count == len(results.rows) + len(plan)
        Console(file=shown, width=80).print(table)
    assert "…" not in shown.getvalue(), "something was cut"


class Still:
    """A deployment that answers at once, wherever its draft is."""

    def __init__(self):
        self.endpoints = {"near": self, "ahead": self}

    def move_draft(self, round_trip_ms):
        pass

    def asks(self, **fields):
        async def ask(request):
            return runner.Run(1.0, [Answer([0] * 10, stats=TOLD) for _ in request.prompts])

        return ask


def test_the_rows_of_the_figures_name_the_pair_that_was_measured(monkeypatch, tmp_path: Path):
    monkeypatch.setattr("bench.distance.__main__.lab", lambda served, num_ahead_tokens: nullcontext(Still()))
    pair = {"target": str(DEMO / "target"), "draft": [str(DEMO / "draft")]}
    main(Common(**pair, temperature=[1.0], json=tmp_path / "json"), quick=True)
    written = json.loads((tmp_path / "json").read_text())
    assert {row["pair"] for row in written["distances"]} == {pair["target"]}


def fast() -> TableCosts:
    return TableCosts(pass_ms=2.0, step_ms=0.2, row_us=20.0)


@pytest.mark.slow
async def test_every_mode_generates_the_same_text_whatever_happens_to_the_draft():
    plan = [Situation(f"{each:g} ms", [ALONE, ADAPTIVE, AHEAD], 1.0, each) for each in (5.0, 9.0)]
    plan.append(Situation("unrelated", [ALONE, Mode("ahead", "unrelated", None)], 1.0))
    plan.append(Situation("gone", [ALONE, AHEAD], 1.0, draft_is_there=False))
    async with lab(served_tables(fast()), 20) as running:
        cases = cases_of(plan, running.endpoints, three_ids, 2, running)
        results = await measure(cases, 20, lambda case, contender: None)
    assert (results.differing, results.num_compared) == ([], 2 * (2 * 2 + 1 + 1))
    rows = rows_of(results, plan, "table")
    assert [(row.situation, row.mode) for row in rows] == [
        (each.place, mode.name) for each in plan for mode in each.modes
    ]
    assert (rows[0].mode, rows[0].tokens_per_round, rows[0].on_time) == ("alone", 1.0, None)
    assert rows[0].round_ms.target_pass > 1.5
    assert rows[-1].draft_tokens_per_round == 0
    assert json.loads(json.dumps(asdict(rows[2])))["outcomes"]["num_bonuses"] == rows[2].outcomes.num_bonuses


@pytest.mark.slow
def test_the_command_writes_its_figures_and_a_chart(tmp_path: Path):
    common = Common(tokens=12, temperature=[1.0], json=tmp_path / "json", chart=tmp_path / "chart.svg")
    main(common, pass_ms=2.0, step_ms=0.2, row_us=20.0, quick=True)
    written = json.loads((tmp_path / "json").read_text())
    assert {row["round_trip_ms"] for row in written["distances"]} == {*ROUND_TRIPS_MS}
    assert written["formula"]
    assert (tmp_path / "chart.svg").exists()
