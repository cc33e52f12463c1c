"""What a draft takes: the way, and a step for each token."""

import random

import pytest

from orchestrator.control.costs import Costs
from orchestrator.control.way import Way
from specdec.core.rounds import Timings


def measured(way_ms: float, step_ms: float, counts: list[int], noise: float = 0.0, way: Way | None = None) -> Way:
    chance, way = random.Random(1), way or Way()
    for count in counts:
        way.observe(count, (way_ms + step_ms * count) / 1e3 * chance.lognormvariate(0.0, noise))
    return way


def milliseconds(way: Way, *counts: int) -> list[float]:
    return [1e3 * way.seconds(count) for count in counts]


def test_two_numbers_of_tokens_tell_both():
    way = measured(20.0, 4.0, [1, 4])
    assert milliseconds(way, 1, 8) == pytest.approx([24.0, 52.0], rel=0.05)
    assert way.is_known
    assert way.reach == 4


def test_one_number_says_nothing_of_the_way():
    assert milliseconds(measured(20.0, 4.0, [4]), 8) == pytest.approx([72.0])


def test_a_draft_that_moves_away_is_as_much_farther_for_every_number_of_tokens():
    """Also where only one was measured since, and few would say that a step takes ten times as long."""
    way = measured(0.5, 4.0, [1, 4, 8] * 20, noise=0.05)
    measured(50.0, 4.0, [1] * 4, way=way)
    assert milliseconds(way, 8) == pytest.approx([82.0], rel=0.2)
    measured(0.5, 4.0, [1] * 2, way=way)
    assert milliseconds(way, 8) == pytest.approx([32.5], rel=0.25)


def test_a_draft_that_grows_slow_is_found_out_once_it_is_asked_for_different_numbers():
    way = measured(5.0, 2.0, [1, 4, 8] * 20, noise=0.05)
    measured(5.0, 12.0, [8, 7, 6, 5, 4, 5, 6, 7] * 3, way=way)
    assert milliseconds(way, 8) == pytest.approx([101.0], rel=0.1)
    assert milliseconds(way, 2) == pytest.approx([29.0], rel=0.3)


def test_one_slow_answer_is_an_accident_and_two_of_three_are_not():
    way = measured(5.0, 2.0, [1, 4, 8] * 20)
    way.observe(4, 0.2)
    assert milliseconds(way, 4) == pytest.approx([13.0], rel=0.3)
    way.observe(4, 0.2)
    way.observe(4, 0.2)
    assert milliseconds(way, 4)[0] > 100.0


def test_noise_leaves_both_close_to_what_they_are():
    way = measured(20.0, 4.0, random.Random(2).choices(range(1, 9), k=400), noise=0.15)
    assert milliseconds(way, 1, 8) == pytest.approx([24.0, 52.0], rel=0.15)


@pytest.mark.parametrize("seed", range(20))
def test_neither_is_ever_less_than_nothing(seed):
    chance, way = random.Random(seed), Way()
    for _ in range(200):
        way.observe(chance.randrange(1, 17), chance.choice([0.0, 1e-6, 0.001, 0.1, 50.0]))
        assert way.seconds(1) > 0
        assert way.seconds(16) >= way.seconds(1)


def test_an_answer_with_a_prefill_in_it_tells_only_that_a_draft_is_nearer():
    costs = Costs(8)
    for count in (1, 4, 1, 4):
        costs.drafted(count, 0.4)
    for rows in (1, 2, 5):
        costs.verified(rows - 1, 0.0405, Timings(0, 40_000, 0, rows, 1), 1, 1)
    far = costs.rounds[4]
    costs.drafted(4, 2.0, takes_in=True)
    assert costs.rounds[4] == far
    costs.drafted(4, 0.02, takes_in=True)
    assert costs.rounds[4] < 0.1, "and the next round is not booked by what was thought before"
