"""The formula finds again what data were made with, and says by how much it is wrong where they were not."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from bench.distance.formula import (
    FITTED_MS,
    PREDICTED_MS,
    Formula,
    Point,
    ahead,
    alone,
    predictions,
    synchronous,
)
from bench.distance.row import RoundMs, Row

PASS_MS, STEP_MS = 40.0, 4.0


def known(hit_rate: float | None, num_draft_tokens: int = 6, acceptance: float = 0.8) -> Formula:
    if hit_rate is None:
        return Formula(PASS_MS, None, 1.0, PASS_MS)
    expected = sum(acceptance**depth for depth in range(num_draft_tokens + 1))
    return Formula(PASS_MS + (1 - hit_rate) * num_draft_tokens * STEP_MS, hit_rate, expected, PASS_MS)


def made(formula: Formula, wrong: float = 0.0, seed: int = 0) -> list[Point]:
    """Points at the fitted distances, each off by up to ``wrong`` of itself."""
    chance = random.Random(seed)
    return [
        Point(
            trip,
            formula.ms_per_token(trip) * (1 + chance.uniform(-wrong, wrong)),
            formula.tokens_per_round,
            formula.pass_ms,
            1 - formula.waiting(trip),
        )
        for trip in FITTED_MS
    ]


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(
    ("fit", "hit_rate"),
    [(alone, None), (synchronous, 0.0), (ahead, 0.0), (ahead, 0.35), (ahead, 0.8), (ahead, 1.0)],
)
def test_parameters_that_are_true_are_found(
    fit: Callable[[Sequence[Point]], Formula], hit_rate: float | None, acceptance: float
) -> None:
    formula = known(hit_rate, 6, acceptance)
    found = fit(made(formula))
    assert found.hit_rate == pytest.approx(hit_rate)
    assert found.round_ms == pytest.approx(formula.round_ms)
    assert (found.tokens_per_round, found.pass_ms) == pytest.approx((formula.tokens_per_round, PASS_MS))
    assert found.ms_per_token(20.0) == pytest.approx(formula.ms_per_token(20.0))


def test_beyond_a_pass_no_two_verdicts_in_a_row_are_foreseen() -> None:
    """Rounds drawn one after the other, as the docstring says that they follow."""
    for round_trip_ms, in_time in ((20.0, True), (60.0, False)):
        chance, num_waits, waited = random.Random(1), 0, True
        for _ in range(100_000):
            waited = chance.random() >= 0.7 if waited or in_time else True
            num_waits += waited
        assert known(0.7).waiting(round_trip_ms) == pytest.approx(num_waits / 100_000, abs=0.01)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_predicted_is_no_more_wrong_than_what_was_measured(seed: int) -> None:
    formula = known(0.6)
    found = ahead(made(formula, wrong=0.05, seed=seed))
    assert found.ms_per_token(20.0) == pytest.approx(formula.ms_per_token(20.0), rel=0.05)


def test_the_error_that_is_least_is_relative() -> None:
    """One number for distances of 1 and 10 ms a token: nearer to the short one."""
    found = alone([Point(0.0, 1.0, 1.0, 1.0), Point(0.0, 10.0, 1.0, 1.0)])
    assert found.round_ms == pytest.approx(1.1 / 1.01)


def test_a_mode_is_predicted_where_it_was_not_fitted_and_the_error_is_said() -> None:
    rows = [
        Row(
            "table",
            0.0,
            f"{trip:g} ms",
            trip,
            mode,
            1e3 / (formula.ms_per_token(trip) * (1.25 if trip == PREDICTED_MS else 1.0)),
            tokens_per_round=formula.tokens_per_round,
            on_time=1 - formula.waiting(trip),
            round_ms=RoundMs(target_pass=PASS_MS),
        )
        for mode, formula in (("alone", known(None)), ("sync, K = 6", known(0.0)), ("ahead", known(0.6)))
        for trip in (*FITTED_MS, PREDICTED_MS)
    ]
    rows.append(Row("table", 0.0, "gone", None, "ahead", 1.0))
    rows.append(Row("table", 1.0, "0 ms", 0.0, "ahead", 1.0))  # measured at no other distance
    found = predictions(rows)
    assert [(each.mode, each.round_trip_ms) for each in found] == [("alone", 20), ("sync, K = 6", 20), ("ahead", 20)]
    assert [each.error for each in found] == pytest.approx([1 / 1.25 - 1] * 3)
    assert [each.formula.hit_rate for each in found] == [None, 0.0, pytest.approx(0.6)]
