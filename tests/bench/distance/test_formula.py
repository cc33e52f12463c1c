"""The formula finds the parameters that data were made with, and states its error where they were not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from bench.distance.formula import (
    FITTED_MS,
    PREDICTED_MS,
    Formula,
    Point,
    adaptive,
    ahead,
    alone,
    predictions,
    synchronous,
)
from bench.distance.row import Outcomes, RoundMs, Row, Run
from specdec.speculation.cost import waiting_share
from specdec.v1.generation_pb2 import SpeculationStats
from tests.orchestrator.control.far_draft import Outcome, Place, Shared, decoded

PASS_MS, STEP_MS = 40.0, 4.0


def known(hit_rate: float | None, first_rate: float = 0.0, waits: float = 0.0, accepted: float = 0.8) -> Formula:
    """With six draft tokens. Without right first tokens no sequence is decoded autonomously."""
    expected, draft_ms = sum(accepted**depth for depth in range(7)), 6 * STEP_MS
    if hit_rate is not None:
        return Formula(PASS_MS, hit_rate, expected, PASS_MS, draft_ms, first_rate)
    if waits == 1.0:
        return Formula(PASS_MS + draft_ms, None, expected, PASS_MS, waits=1.0)
    return Formula(PASS_MS, None, expected if waits else 1.0, PASS_MS, draft_ms if waits else 0.0, waits=waits)


def made(formula: Formula, wrong: float = 0.0, seed: int = 0) -> list[Point]:
    """Points at the fitted distances, each off by up to ``wrong`` of itself."""
    chance = random.Random(seed)
    points = []
    for trip in FITTED_MS:
        waits = waiting(formula, trip)
        points.append(
            Point(
                trip,
                formula.ms_per_token(trip) * (1 + chance.uniform(-wrong, wrong)),
                formula.tokens_per_round,
                formula.pass_ms,
                formula.hit_rate or 0.0,
                formula.first_rate,
                waits,
                waits * (trip + formula.wait_ms),
            )
        )
    return points


def waiting(formula: Formula, round_trip_ms: float) -> float:
    """The share of rounds that wait for the draft."""
    if formula.hit_rate is None:
        return formula.waits
    waits = waiting_share(formula.hit_rate, 1 if round_trip_ms <= formula.pass_ms else 2)
    waiting_ms = (formula.round_ms + waits * (round_trip_ms + formula.wait_ms)) / formula.tokens_per_round
    return waits if formula.ms_per_token(round_trip_ms) == pytest.approx(waiting_ms) else 0.0


@pytest.mark.parametrize("accepted", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(
    ("fit", "hit_rate", "first_rate", "waits"),
    [
        (alone, None, 0.0, 0.0),
        (synchronous, None, 0.0, 1.0),
        (adaptive, None, 0.0, 0.3),
        (ahead, 0.35, 0.0, 0.0),
        (ahead, 0.35, 0.5, 0.0),
        (ahead, 0.8, 0.9, 0.0),
        (ahead, 1.0, 1.0, 0.0),
    ],
)
def test_parameters_that_are_true_are_found(
    fit: Callable[[Sequence[Point]], Formula], hit_rate: float | None, first_rate: float, waits: float, accepted: float
) -> None:
    formula = known(hit_rate, first_rate, waits, accepted=accepted)
    found = fit(made(formula))
    assert (found.hit_rate, found.waits) == pytest.approx((hit_rate, waits))
    assert found.round_ms == pytest.approx(formula.round_ms)
    assert (found.tokens_per_round, found.pass_ms) == pytest.approx((formula.tokens_per_round, PASS_MS))
    assert found.ms_per_token(20.0) == pytest.approx(formula.ms_per_token(20.0))


def test_a_prediction_is_no_more_wrong_than_the_measurements() -> None:
    formula = known(0.6, 0.8)
    for seed in range(20):
        found = ahead(made(formula, wrong=0.05, seed=seed))
        assert found.ms_per_token(20.0) == pytest.approx(formula.ms_per_token(20.0), rel=0.05)


@pytest.mark.parametrize(("acceptance", "pass_ms", "never_waits"), [(0.8, 40.0, True), (0.95, 400.0, False)])
async def test_the_loop_itself_is_predicted_whether_it_waits_or_not(
    acceptance: float, pass_ms: float, never_waits: bool
) -> None:
    """In simulated time, where nothing but the formula can be wrong."""
    rows = []
    for trip in (*FITTED_MS, PREDICTED_MS):
        place, shared = Place(acceptance, pass_ms=pass_ms, distance_ms=trip), Shared(ahead=True)
        await decoded(place, 100, shared=shared)  # what a controller learns first is not measured
        runs = [_run(400, await decoded(place, 400, shared=shared, seed=1))]
        rows.append(Row.of("simulated", 0.0, f"{trip:g} ms", trip, "ahead", runs))
    assert (rows[-1].round_ms.draft_wait < 1.0) is never_waits
    [found] = predictions(rows)
    assert abs(found.error) < 0.2


def _run(num_tokens: int, outcome: Outcome) -> Run:
    names = [field.name for field in SpeculationStats.DESCRIPTOR.fields]
    told = SpeculationStats(**{name: getattr(outcome.statistics, name) for name in names})
    return Run(num_tokens, num_tokens / outcome.tokens_per_s, (told,))


def test_a_mode_is_predicted_where_it_was_not_fitted_and_the_error_is_said() -> None:
    rows = [
        Row(
            "table",
            0.0,
            f"{trip:g} ms",
            trip,
            mode,
            (1e3 / (formula.ms_per_token(trip) * (1.25 if trip == PREDICTED_MS else 1.0)),),
            tokens_per_round=formula.tokens_per_round,
            on_time=1 - waiting(formula, trip),
            # All of them corrections at once, so none is decoded autonomously.
            outcomes=Outcomes(0, 0, (10_000,), (round(10_000 * (1 - waiting(formula, trip))),)),
            round_ms=RoundMs(waiting(formula, trip) * (formula.wait_ms + trip), target_pass=PASS_MS),
            accepted_per_round=formula.tokens_per_round - 1,
            drafts_per_round=1.0,
        )
        for mode, formula in (("alone", known(None)), ("sync, K = 6", known(None, waits=1.0)), ("ahead", known(0.6)))
        for trip in (*FITTED_MS, PREDICTED_MS)
    ]
    rows.append(Row("table", 0.0, "gone", None, "ahead", (1.0,)))
    rows.append(Row("table", 1.0, "0 ms", 0.0, "ahead", (1.0,)))  # measured at no other distance
    found = predictions(rows)
    assert [(each.mode, each.round_trip_ms) for each in found] == [("alone", 20), ("sync, K = 6", 20), ("ahead", 20)]
    assert [each.error for each in found] == pytest.approx([1 / 1.25 - 1] * 3)
    assert [each.formula.hit_rate for each in found] == [None, None, pytest.approx(0.6)]
    assert [each.formula.waits for each in found] == [0.0, 1.0, 0.0]
