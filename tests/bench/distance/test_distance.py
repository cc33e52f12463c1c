"""What bench distance makes of its rows, and that all modes of its deployment generate the target's text."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict

import pytest
from rich.console import Console

from bench.distance import table
from bench.distance.formula import predictions
from bench.distance.lab import lab
from bench.distance.modes import ADAPTIVE, AHEAD, ALONE, BLOCK, modes, sync
from bench.distance.pairs import Pair, PairName, TableCosts, make
from bench.distance.ratios import over_adaptive, pair_of_ratios, ratios
from bench.distance.row import Outcomes, RoundMs, Row, Run
from bench.distance.situations import ROUND_TRIPS_MS, Situation, groups, measure, num_runs, situations
from specdec.v1.generation_pb2 import SpeculationStats

SITUATIONS = ("0 ms", "1 ms", "5 ms", "20 ms", "50 ms", "32 streams", "random", "gone")


def rows_of(pair: str, rates: dict[tuple[str, str], float], temperature: float = 0.0) -> list[Row]:
    """All modes with 10 tokens/s but where ``rates`` says otherwise."""
    names = [mode.name for mode in modes(temperature, (4, 6, 8), with_block=True, quick=False)]
    rate = {(situation, mode): 10.0 for situation in SITUATIONS for mode in names} | rates
    return [Row(pair, temperature, situation, None, mode, (each,)) for (situation, mode), each in rate.items()]


RATES = {
    ("20 ms", "sync, K = 6"): 20.0,
    ("20 ms", AHEAD.name): 30.0,
    ("0 ms", AHEAD.name): 40.0,
    ("0 ms", "sync, K = 8"): 32.0,
    ("50 ms", "sync, K = 4"): 5.0,
    ("50 ms", ADAPTIVE.name): 12.5,
    ("random", AHEAD.name): 9.0,
}
FIGURES = {
    "worst_over_alone": 0.9,
    "ahead_over_sync_rtt20": 1.5,
    "ahead_over_alone_rtt20": 3.0,
    "ahead_over_sync_rtt50": 1.0,
    "ahead_over_sync_rtt0": 1.25,
    "ahead_rtt20_over_rtt0": 0.75,
}


@pytest.mark.parametrize("pair", ["table", "damped"])
def test_ratios_compare_with_the_best_synchronous_draft_and_find_the_worst_case(pair):
    assert ratios(rows_of(pair, RATES)) == FIGURES
    assert pair_of_ratios(rows_of(pair, RATES)) == pair
    assert ratios([]) == {}


def test_the_adaptive_mode_is_compared_apart():
    others = {"0 ms": 4.0, "1 ms": 1.0, "5 ms": 1.0, "20 ms": 3.0, "32 streams": 1.0, "gone": 1.0}
    assert over_adaptive(rows_of("damped", RATES)) == others | {"50 ms": 0.8, "random": 0.9}
    assert over_adaptive(rows_of("damped", {}, temperature=1.0)) == over_adaptive([]) == {}


def test_ratios_are_medians_of_the_turns_of_the_damped_pair_without_a_temperature():
    """A machine that is half as fast in the second turn changes nothing."""
    ahead = Row("bundled", 1.0, "5 ms", 5.0, AHEAD.name, (12.0, 6.0, 30.0))
    alone = Row("bundled", 1.0, "5 ms", 5.0, ALONE.name, (10.0, 5.0, 10.0))
    assert ahead.over(alone) == 1.2
    rows = [*rows_of("table", {}), *rows_of("damped", RATES), *rows_of("damped", {}, 1.0), ahead, alone]
    assert pair_of_ratios(rows) == "damped"
    assert ratios(rows) == FIGURES | {"bundled_t1_ahead_over_alone_rtt5": 1.2}


def test_a_row_is_the_median_speed_and_the_sum_of_the_statistics():
    told = SpeculationStats(
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
    other = SpeculationStats(num_rounds=5, num_corrections_per_pos=[0, 0, 2], num_correction_hits_per_pos=[0, 0, 1])
    runs = [Run(10, 1.0, (told,)), Run(10, 2.0, (other,)), Run(10, 5.0, ())]
    row = Row.of("table", 0.0, "0 ms", 0.0, "ahead", runs)
    assert (row.tokens_per_s, row.on_time, row.drafts_per_round, row.unused_nodes_per_round) == (5.0, 0.75, 0.4, 2.0)
    assert (row.draft_tokens_per_round, row.accepted_per_round, row.tokens_per_round) == (1.2, 0.6, 3.0)
    assert row.outcomes == Outcomes(1, 1, (1, 1, 2), (0, 1, 1))
    assert (row.outcomes.bonus_hits, row.outcomes.correction_hits, row.outcomes.hits) == (1.0, 0.5, 0.6)
    assert row.outcomes.firsts == 0.8
    spent = row.round_ms
    parts = (spent.draft_wait, spent.target_queue, spent.target_pass, spent.target_sample, spent.rest)
    assert parts == pytest.approx((0.5, 0.1, 3.0, 0.4, 1.0)), "over eight rounds, the first of either not counted"
    row = Row.of("table", 0.0, "0 ms", 0.0, "alone", [Run(3, 1.0, (SpeculationStats(num_rounds=3),))])
    assert (row.on_time, row.outcomes.hits, row.outcomes.bonus_hits, row.outcomes.correction_hits) == (None,) * 4


def table_pair(tmp_path, **costs: float) -> Pair:
    return make(PairName.table, tmp_path, TableCosts(**costs))


def rows_of_the_quick_plan(tmp_path, **fields) -> list[Row]:
    """A row for each of its modes and situations."""
    return [
        Row("table", each.temperature, each.name, each.round_trip_ms, mode.name, (10.0,), **fields)
        for each in situations(table_pair(tmp_path), quick=True)
        for mode in each.modes
    ]


def test_every_mode_is_measured_at_every_distance_and_block_where_something_is_drawn(tmp_path):
    for name, with_block in ((PairName.table, False), (PairName.bundled, True)):
        pair = make(name, tmp_path, TableCosts())
        plan = situations(pair, quick=False)
        for temperature in (0.0, 1.0):
            distances = [each for each in plan if each.temperature == temperature and each.round_trip_ms is not None]
            assert [each.round_trip_ms for each in distances] == list(ROUND_TRIPS_MS)
            for each in distances:
                names = [mode.name for mode in each.modes]
                assert {"alone", "ahead", "sync, adaptive", *(sync(k).name for k in pair.fixed)} <= {*names}
                blocked = [mode for mode in each.modes if mode.method == BLOCK]
                assert bool(blocked) is (with_block and temperature > 0)
                assert all(mode.front == "near" and mode.num_draft_tokens for mode in blocked)
                assert len(names) == len({*names})
        together, *others = groups(plan)
        assert together == [each for each in plan if each.round_trip_ms is not None]
        assert [each.name for [each] in others] == ["32 streams", *(["random"] if pair.stranger else []), "gone"]


def test_one_temperature_can_be_measured_alone(tmp_path):
    pair = table_pair(tmp_path)
    whole = situations(pair, quick=False)
    for temperature in (0.0, 1.0):
        plan = situations(pair, quick=False, temperatures=[temperature])
        assert plan == [each for each in whole if each.temperature == temperature]


def test_the_quick_plan_has_all_that_ratios_and_formula_need(tmp_path):
    rows = rows_of_the_quick_plan(tmp_path)
    assert ratios(rows).keys() == FIGURES.keys()
    assert {(each.temperature, each.mode) for each in predictions(rows)} == {
        *((0.0, name) for name in ("alone", "sync, K = 4", "sync, K = 6", "sync, K = 8", "sync, adaptive", "ahead")),
        *((1.0, name) for name in ("alone", "sync, K = 6", "ahead")),
    }


def test_the_tables_have_a_line_per_row_and_fit_a_terminal(tmp_path):
    outcomes = Outcomes(2, 1, (9,) * 8, (8,) * 8)
    rows = rows_of_the_quick_plan(tmp_path, outcomes=outcomes, round_ms=RoundMs(target_pass=40.0))
    console = Console(width=80, record=True)
    for pair, temperature, some in table.sections(rows):
        num_situations = len({row.situation for row in some})
        for shown in (table.speeds(some, pair), table.times(some, pair)):
            assert shown.row_count == len(some) + num_situations
            console.print(shown)
        shown = table.hits(some, pair)
        assert shown.row_count == sum(row.mode == AHEAD.name for row in some)
        console.print(shown)
        assert temperature in (0.0, 1.0)
    console.print(table.formula(predictions(rows)))
    text = console.export_text()
    assert "8/9" in text
    assert "…" not in text, "something was cut"


def test_the_chart_is_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    from bench.distance.chart import draw

    rows = [
        Row(pair, temperature, f"{trip:g} ms", trip, mode.name, (10.0 + index,), tokens_per_round=1.0 + index)
        for pair, temperature, trip in itertools.product(("table", "bundled"), (0.0, 1.0), ROUND_TRIPS_MS)
        for index, mode in enumerate(modes(temperature, (4, 6, 8), with_block=True, quick=False))
    ]
    file = tmp_path / "chart.png"
    draw(rows, {"table": "table pair: sleeps", "bundled": "bundled pair: computes"}, file)
    assert file.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
async def test_every_mode_generates_the_same_text_whatever_happens_to_the_draft(tmp_path):
    async with lab(table_pair(tmp_path, pass_ms=2.0, step_ms=0.2, row_us=20.0), 20) as running:
        request = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 30, "temperature": 1.0, "seed": 3}
        [alone] = await running.clients["near"].generate(**request, num_draft_tokens=0)
        for name, client in running.clients.items():
            [sample] = await client.generate(**request)
            assert sample.token_ids == alone.token_ids, name
        done = []
        group = [Situation(f"{each:g} ms", [ALONE, AHEAD], 1.0, each) for each in (5.0, 9.0)]
        [[row, ahead], other] = await measure(running, group, 20, 2, lambda *run: done.append(run))
        # What learns is tried first.
        turn = [(each.name, mode) for each in group for mode in ("ahead", "alone", "ahead")]
        assert [(situation.name, mode.name) for situation, mode in done] == turn * 2
        assert len(done) == num_runs(group, repeats=2)
        assert {each.situation for each in (row, ahead)} == {"5 ms"} != {each.situation for each in other}
        assert (row.mode, row.tokens_per_round, row.on_time) == ("alone", 1.0, None)
        assert row.round_ms.target_pass > 1.5
        assert json.loads(json.dumps(asdict(ahead)))["outcomes"]["num_bonuses"] == ahead.outcomes.num_bonuses
        gone = [Situation("gone", [AHEAD], draft_is_there=False)]
        [rows] = await measure(running, gone, 20, 1, lambda *run: done.append(run))
        assert rows[0].draft_tokens_per_round == 0
        [sample] = await running.clients["ahead"].generate(**request)
        assert sample.token_ids == alone.token_ids
