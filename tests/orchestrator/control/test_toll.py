"""What a trial really cost decides when there is another."""

from __future__ import annotations

from orchestrator.control.toll import Toll

FOUR, BEGUN, OVER = 4, 100, 110
"""Sequences; the pass in which a trial begins, and the first one that is none of it any more."""


def toll_of(gain: float, reckoned: float = 0.0, passes: range = range(BEGUN, OVER)) -> Toll:
    """Of a trial in which everybody together gained so much in each pass."""
    toll = Toll()
    toll.begin(OVER - 2, FOUR)
    toll.reckoned(reckoned)
    for now in passes:
        for _ in range(FOUR):
            toll.gained(gain / FOUR, FOUR, now)
    return toll


def test_what_costs_no_more_than_reckoned_may_be_tried_again_at_once():
    assert toll_of(0.0).again(FOUR) == OVER
    assert toll_of(0.3).again(FOUR) == OVER
    assert toll_of(-0.3, reckoned=-3.0).again(FOUR) == OVER


def test_a_trial_that_cost_more_is_paid_for_before_the_next():
    """A round, at 1.5 % of all of them."""
    assert toll_of(-0.1).again(FOUR) == OVER + 67
    assert toll_of(-0.3, reckoned=-2.0).again(FOUR) == OVER + 67


def test_an_accident_is_not_held_against_trials_for_ever():
    assert toll_of(-99.0).again(FOUR) == OVER + 256


def test_what_is_dear_among_some_says_nothing_of_many_or_few():
    toll = toll_of(-99.0)
    assert toll.again(1) == toll.again(16) == 0


def test_what_comes_after_a_trial_is_not_its_doing():
    assert toll_of(-99.0, passes=range(OVER, 2 * OVER)).again(FOUR) == 0


def test_each_trial_is_held_against_what_was_reckoned_of_it():
    toll = toll_of(-99.0)
    toll.begin(2 * OVER - 2, FOUR)
    toll.gained(0.0, FOUR, 2 * OVER - 1)
    assert toll.again(FOUR) == 2 * OVER
