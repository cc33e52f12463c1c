"""The formula finds again what data were made with, and says by how much it is wrong where they were not."""

from __future__ import annotations

import random

import pytest

from bench.distance.formula import FITTED_MS, PREDICTED_MS, Formula, Point, fit, predictions
from bench.distance.row import Row

PASS_MS, STEP_MS = 40.0, 4.0


def made(formula: Formula, wrong: float = 0.0, seed: int = 0) -> list[Point]:
    """Points at the fitted distances, each off by up to ``wrong`` of itself."""
    random_ = random.Random(seed)
    return [
        Point(trip, formula.ms_per_token(trip) * (1 + random_.uniform(-wrong, wrong)), formula.tokens_per_round)
        for trip in FITTED_MS
    ]


def known(waiting: float, num_draft_tokens: int, acceptance: float) -> Formula:
    expected = sum(acceptance**depth for depth in range(num_draft_tokens + 1))
    return Formula(PASS_MS + waiting * num_draft_tokens * STEP_MS, waiting, expected)


@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize(("waiting", "given"), [(0.0, 0.0), (1.0, 1.0), (0.35, None), (0.0, None), (1.0, None)])
def test_parameters_that_are_true_are_found(waiting, given, acceptance):
    formula = known(waiting, 6 if waiting else 0, acceptance)
    found = fit(made(formula), given)
    assert found.waiting == pytest.approx(waiting, abs=1e-9)
    assert found.round_ms == pytest.approx(formula.round_ms)
    assert found.ms_per_token(20.0) == pytest.approx(formula.ms_per_token(20.0))


@pytest.mark.parametrize("seed", range(20))
def test_what_is_predicted_is_no_more_wrong_than_what_was_measured(seed):
    formula = known(0.4, 6, 0.8)
    found = fit(made(formula, wrong=0.05, seed=seed), None)
    assert found.ms_per_token(20.0) == pytest.approx(formula.ms_per_token(20.0), rel=0.1)


def test_the_error_that_is_least_is_relative():
    """One number for distances of 1 and 10 ms a token: nearer to the short one."""
    found = fit([Point(0.0, 1.0, 1.0), Point(0.0, 10.0, 1.0)], 0.0)
    assert found.round_ms == pytest.approx(1.1 / 1.01)


def test_no_more_than_all_rounds_wait_and_no_fewer_than_none():
    steep = [Point(trip, 10.0 + 3.0 * trip, 1.0) for trip in FITTED_MS]
    falling = [Point(trip, 60.0 - trip, 1.0) for trip in FITTED_MS]
    assert fit(steep, None).waiting == 1.0
    assert fit(falling, None).waiting == 0.0


def test_a_mode_is_predicted_where_it_was_not_fitted_and_the_error_is_said():
    rows = [
        Row("table", 0.0, f"{trip:g} ms", trip, mode, 1e3 / (speed(trip) * wrong(trip)), tokens_per_round=tokens)
        for mode, speed, tokens in (
            ("alone", known(0.0, 0, 0.8).ms_per_token, 1.0),
            ("sync, K = 6", known(1.0, 6, 0.8).ms_per_token, known(1.0, 6, 0.8).tokens_per_round),
            ("ahead", known(0.4, 6, 0.8).ms_per_token, known(0.4, 6, 0.8).tokens_per_round),
        )
        for trip in (*FITTED_MS, PREDICTED_MS)
        for wrong in [lambda trip: 1.25 if trip == PREDICTED_MS else 1.0]
    ]
    rows.append(Row("table", 0.0, "gone", None, "ahead", 1.0))
    rows.append(Row("table", 1.0, "0 ms", 0.0, "ahead", 1.0))  # measured at no other distance
    found = predictions(rows)
    assert [(each.mode, each.round_trip_ms) for each in found] == [("alone", 20), ("sync, K = 6", 20), ("ahead", 20)]
    assert [each.error for each in found] == pytest.approx([1 / 1.25 - 1] * 3)
    assert [each.formula.waiting for each in found] == pytest.approx([0.0, 1.0, 0.4])
