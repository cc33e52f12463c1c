"""Tokens of a round, and what growing ahead saves, against rounds that are drawn one after the other."""

from __future__ import annotations

import itertools
import random

import pytest

from specdec.speculation.cost import Round, ahead_round, best_number, chain_chances, expected_tokens, waiting_share


def test_the_tokens_of_a_chain_are_those_of_draws():
    chance, siblings = random.Random(1), [0.6, 0.3]
    expected = expected_tokens(chain_chances(siblings, num_siblings=1), 4)
    total = 0
    for _ in range(40_000):
        right = 0
        while right < 4 and chance.random() < (0.9 if not right else 0.6):
            right += 1
        total += right + 1
    assert expected[4] == pytest.approx(total / 40_000, rel=0.01)
    assert expected_tokens(iter([0.5]), 3) == [1.0, 1.5, 1.5, 1.5]


def test_the_smallest_of_equally_good_numbers_is_chosen():
    assert best_number([1.0, 2.0, 3.0, 4.0], lambda number: number + 1.0, range(4)) == 0
    assert best_number([1.0, 2.0, 3.0, 4.0], lambda number: 1.0 + 0.5 * min(number, 2), range(1, 4)) == 3


@pytest.mark.parametrize("num_late", [1, 2])
def test_after_a_hit_the_draft_may_hear_too_late(num_late):
    chance, num_waits, waited = random.Random(1), 0, True
    for _ in range(30_000):
        waited = chance.random() >= 0.7 if waited or num_late == 1 else True
        num_waits += waited
    assert waiting_share(0.7, num_late) == pytest.approx(num_waits / 30_000, abs=0.01)


def test_a_round_waits_or_continues_whichever_is_faster():
    drafted = Round(4.0, 0.04)
    assert ahead_round(drafted, 1e9, 0.6, first_rate=0.0, num_late=1).seconds > 1e8
    assert ahead_round(drafted, 0.01, 0.6, first_rate=0.8, num_late=1) == Round(4.0, pytest.approx(0.044))
    continuing = ahead_round(drafted, 1e9, 0.6, first_rate=0.8, num_late=2)
    chance, num_rounds, num_tokens = random.Random(1), 0, 0
    for _ in range(30_000):
        num_rounds, num_tokens = num_rounds + 1, num_tokens + 4
        if chance.random() >= 0.6:
            late = 1 + next(number for number in itertools.count(1) if chance.random() < 0.8**2)
            num_rounds, num_tokens = num_rounds + late, num_tokens + late
    assert continuing.tokens_per_s == pytest.approx(num_tokens / num_rounds / 0.04, rel=0.01)


def test_the_more_sequences_share_a_pass_the_more_often_it_waits():
    one, four = (ahead_round(Round(4.0, 0.04), 0.01, 0.6, 0.1, num_late=1, num_sequences=n) for n in (1, 4))
    assert one.seconds < four.seconds < 0.05
