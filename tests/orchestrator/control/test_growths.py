"""What drafts take is learnt from those who draft together."""

from __future__ import annotations

import pytest

from orchestrator.control.growths import Growths
from orchestrator.control.way import Way


def known(way_s: float = 0.010, step_s: float = 0.004) -> tuple[Way, Growths]:
    """Of eight requests that draft together."""
    way = Way()
    growths = Growths(way)
    for number in range(40):
        count = 1 + number % 4
        for _ in range(8):
            growths.took(count, way_s + step_s * count, 8)
        growths.passed(8)
    assert way.seconds(2) == pytest.approx(0.018, rel=0.01)
    return way, growths


def test_one_that_drafts_alone_is_hardly_a_measure_of_what_all_wait_for():
    way, growths = known()
    for number in range(4):
        growths.took(2, 0.006, 8)
        growths.passed(8)
        if not number:
            assert way.seconds(2) > 0.015
    assert way.seconds(2) < 0.015, "but who never drafts with others learns it, too"


def test_half_of_them_are():
    way, growths = known()
    for _ in range(4):
        growths.took(2, 0.006, 8)
    assert way.seconds(2) == pytest.approx(0.006, rel=0.2), "also before the pass"


def test_the_middle_one_of_them_counts():
    way, growths = known()
    for seconds in (0.5, 0.018, 0.002, 0.018, 0.3, 0.4, 0.5, 0.6):
        growths.took(2, seconds, 8)
    assert way.seconds(2) == pytest.approx(0.018, rel=0.05)


def test_a_request_that_is_alone_is_all_of_them():
    way, growths = known()
    growths.took(2, 0.006, 1)
    assert way.seconds(2) == pytest.approx(0.006, rel=0.2)


def test_something_is_known_after_the_first_one():
    way = Way()
    Growths(way).took(4, 0.04, 32)
    assert way.seconds(4) == pytest.approx(0.04)


def test_it_is_told_when_a_draft_takes_a_lot_more():
    _, growths = known()
    assert [growths.took(2, 0.100, 8) for _ in range(3)] == [False] * 3
    assert not growths.took(2, 0.018, 8)
    growths.passed(8)
    told = []
    for _ in range(3):
        told += [growths.took(2, 0.100, 8) for _ in range(8)]
        growths.passed(8)
    assert any(told)
