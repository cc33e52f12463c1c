"""How often the guesses of a table model are right."""

from __future__ import annotations

import pytest

from bench.models.table_model import Table
from specdec.core.sequence import SamplingParams, SequenceSpec

SPEC = SequenceSpec((1, 2, 3), 3, SamplingParams(0.0), 0)
POSITIONS = range(3, 4003)


@pytest.mark.parametrize(("acceptance", "runner_up"), [(0.8, 0.33), (0.5, 0.5), (0.0, 1.0), (0.0, 0.0)])
def test_guesses_are_right_as_often_as_they_are_told_to_be(acceptance, runner_up):
    table = Table(acceptance=acceptance, runner_up=runner_up)
    ranks = []
    for position in POSITIONS:
        tail = (position, 7 * position, 11)
        guesses = table.guesses(SPEC, tail, position, 6)
        assert len({*guesses}) == 6
        assert guesses[0] == table.guess(SPEC, tail, position)
        token = table.next_token(SPEC, tail, position)
        ranks.append(guesses.index(token) if token in guesses else None)
    assert ranks.count(0) / len(ranks) == pytest.approx(acceptance, abs=0.03)
    assert ranks.count(1) / len(ranks) == pytest.approx((1 - acceptance) * runner_up, abs=0.03)
    assert {*ranks} <= {0, 1, None}, "no third guess is right"
