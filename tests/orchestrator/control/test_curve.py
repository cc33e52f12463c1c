"""The time of a pass or a draft by its rows: from what was measured, between that and beyond it."""

from __future__ import annotations

import random

import pytest

from orchestrator.control.curve import Curve


def measured(points: dict[int, float], times: int = 20, noise: float = 0.0) -> Curve:
    curve, chance = Curve(), random.Random(0)
    for _ in range(times):
        for count, seconds in points.items():
            curve.observe(count, seconds * chance.lognormvariate(0.0, noise))
    return curve


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_line_is_found_between_and_beyond_what_was_measured(noise):
    curve = measured({4: 0.024, 32: 0.052, 64: 0.084}, times=100, noise=noise)
    for count in (1, 10, 48, 100):
        assert curve.seconds(count) == pytest.approx(0.020 + 0.001 * count, rel=0.15 if noise else 0.05)


def test_a_knee_is_seen_where_it_was_measured():
    curve = measured({count: 0.02 * max(1.0, count / 200) for count in (16, 64, 128, 200, 400)}, times=100)
    assert curve.seconds(100) == pytest.approx(0.02, rel=0.1)
    assert curve.seconds(400) == pytest.approx(0.04, rel=0.1)


def test_from_one_count_all_of_the_time_is_taken_to_grow():
    curve = measured({10: 0.05})
    assert curve.seconds(2) == pytest.approx(0.01)
    assert curve.seconds(40) == pytest.approx(0.2)


def test_far_beyond_what_was_measured_the_time_is_taken_to_grow_with_the_count():
    curve = measured({4: 0.020, 10: 0.020})
    assert curve.seconds(20) == pytest.approx(0.020)
    assert curve.seconds(200) == pytest.approx(0.200)


def test_a_first_measurement_far_away_is_believed_as_far_as_the_time_may_have_grown():
    curve = measured({4: 0.020, 10: 0.020})
    for count, seconds in ((160, 0.300), (11, 0.300)):
        curve.observe(count, seconds)
    assert curve.seconds(160) == pytest.approx(0.300, rel=0.1)
    assert curve.seconds(11) < 0.035, "an accident"
    assert curve.seconds(4) == pytest.approx(0.020, rel=0.1)


def test_it_never_falls():
    curve = measured({1: 0.02, 2: 0.05, 3: 0.01, 4: 0.03, 9: 0.02})
    values = [curve.seconds(count) for count in range(1, 30)]
    assert values == sorted(values)
    assert values[0] >= 0.0


def test_a_few_that_were_fast_by_accident_do_not_stand_for_what_was_measured_often():
    curve = measured({4: 0.030}, times=100)
    for count in (5, 6, 7):
        curve.observe(count, 0.020)
    assert curve.seconds(4) == pytest.approx(0.030, rel=0.05)
    assert curve.seconds(7) >= curve.seconds(4)


def test_one_accident_is_forgotten_and_two_in_a_row_are_news():
    curve = measured({1: 0.02, 5: 0.02}, times=50)
    curve.observe(5, 2.0)
    assert curve.seconds(5) < 0.025
    for _ in range(6):
        curve.observe(5, 2.0)
    assert curve.seconds(5) > 0.4


def test_a_slower_machine_is_slower_at_every_count():
    curve = measured({1: 0.02, 5: 0.03}, times=50)
    for _ in range(30):
        curve.observe(5, 0.06)
    assert curve.seconds(1) == pytest.approx(0.04, rel=0.15)


def test_what_is_fast_again_is_believed_at_once():
    curve = measured({1: 2.0, 5: 2.0}, times=20)
    curve.observe(5, 0.02)
    assert curve.seconds(1) == pytest.approx(0.02, rel=0.1)


def test_a_time_is_never_nothing():
    """Where a line through what was measured reaches zero: nothing may be divided by it."""
    curve = measured({10: 0.001, 20: 0.01, 40: 0.03}, times=20)
    assert curve.seconds(1) > 0


def test_a_first_measurement_that_is_an_accident_is_none_once_more_takes_less():
    """As in a process that has just begun: its first pass takes twice as long as it will ever again."""
    curve = Curve()
    for count, seconds in ((8, 0.035), (4, 0.014), (20, 0.020)):
        curve.observe(count, seconds)
    assert curve.seconds(8) < 0.020
    assert curve.seconds(12) < 0.022
    assert curve.seconds(4) == pytest.approx(0.014, rel=0.2)


def test_a_fast_one_at_a_count_that_is_hardly_known_tells_nothing_of_the_others():
    curve = Curve()
    for _ in range(50):
        curve.observe(4, 0.014)
    curve.observe(16, 0.040)
    curve.observe(16, 0.015)
    assert curve.seconds(4) == pytest.approx(0.014, rel=0.05)
    assert curve.seconds(16) < 0.020


@pytest.mark.parametrize("times", [2.2, 3.0, 4.0])
def test_a_machine_that_gets_much_faster_is_known_soon_also_where_little_was_measured(times: float) -> None:
    """Whichever count shows it first: it is not taken twice, once for an accident and once for the machine."""
    usual = {4: 0.036, 8: 0.040, 12: 0.045, 16: 0.050}
    for order in ([4, 8, 12, 16], [16, 12, 8, 4], [8, 4, 16, 12]):
        curve = Curve()
        for _ in range(10):
            curve.observe(4, usual[4])
        for count in (8, 12, 16):
            curve.observe(count, usual[count])
            curve.observe(count, usual[count])
        for count in [*order, *order]:
            curve.observe(count, usual[count] / times)
        for count, seconds in usual.items():
            assert curve.seconds(count) == pytest.approx(seconds / times, rel=0.35)


def test_an_accident_of_long_ago_is_not_put_back_when_the_machine_gets_faster():
    curve = Curve()
    for _ in range(50):
        curve.observe(4, 0.014)
    curve.observe(16, 0.040)
    for _ in range(50):
        curve.observe(16, 0.015)
        curve.observe(4, 0.014)
    for _ in range(2):
        curve.observe(4, 0.014 / 3)
        curve.observe(16, 0.015 / 3)
    assert curve.seconds(4) == pytest.approx(0.014 / 3, rel=0.1)
    assert curve.seconds(16) == pytest.approx(0.015 / 3, rel=0.1)
