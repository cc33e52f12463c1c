"""When a pass begins: who is about to be back is waited for where that saves more than it costs, and nobody else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.control.controller import Fixed
from specdec.server.batch_delay import Gathering
from tests.orchestrator.control.simulation import Place, Run, fixed, tokens_per_s


def known(pass_s: float = 0.020, per_row_s: float = 0.0, away_s: float = 0.004, sequences: int = 8) -> Gathering:
    """Passes of so long and so much more for every row; all sequences are as long away, and here now, at 10 s."""
    gathering = Gathering()
    for number in range(40):
        rows = 4 + number % 5
        gathering.passed(rows, pass_s + per_row_s * rows, 0.0)
    for key in range(sequences):
        for number in range(4):
            gathering.told(key, 1, number)
            gathering.back(key, number + away_s)
    return gathering


def told(gathering: Gathering, keys: range, now: float = 10.0, rows: int = 1) -> None:
    for key in keys:
        gathering.told(key, rows, now)


def test_a_half_that_is_soon_back_is_waited_for():
    gathering = known()
    told(gathering, range(4))
    assert gathering.rest_s(4, 4, 4, 10.0) == pytest.approx(0.004)
    for key in range(4):
        gathering.back(key, 10.004)
    assert gathering.rest_s(8, 8, 8, 10.004) == 0


def test_many_do_not_wait_for_one_if_they_are_in_every_pass_anyway():
    gathering = known()
    told(gathering, range(1))
    assert gathering.rest_s(7, 0, 7, 10.0) == 0
    assert gathering.rest_s(1, 0, 1, 10.0) > 0


def test_who_leaves_waits_for_as_many_as_there_are_to_leave_and_be_back_together_from_then_on():
    gathering = known()
    told(gathering, range(1))
    assert gathering.rest_s(7, 7, 7, 10.0) == pytest.approx(0.004)


@pytest.mark.parametrize(("away_s", "waits"), [(0.015, True), (0.019, False)])
def test_two_halves_that_would_take_turns_find_together_if_that_makes_rounds_shorter(away_s, waits):
    """In turns a round takes two passes of 20 ms, together one and the time that they are away."""
    gathering = known(away_s=away_s)
    told(gathering, range(4))
    assert gathering.rest_s(4, 4, 4, 10.0) == pytest.approx(away_s if waits else 0.0)


def test_nobody_waits_for_those_who_are_away_for_longer_than_a_pass():
    gathering = known(away_s=0.021)
    told(gathering, range(7))
    assert gathering.rest_s(1, 1, 1, 10.0) == 0


def test_a_stranger_is_taken_to_be_like_the_others_where_there_were_some():
    gathering = known()
    gathering.told("new", 1, 10.0)
    assert gathering.rest_s(1, 1, 1, 10.0) == pytest.approx(0.004)
    assert gathering.rest_s(1, 1, 1, 10.007) == 0, "it is late, as they would be"
    fresh = known(sequences=0)
    fresh.told("new", 1, 10.0)
    assert fresh.rest_s(1, 1, 1, 10.0) == 0


def test_nobody_waits_for_who_is_gone():
    gathering = known()
    told(gathering, range(4))
    for key in range(4):
        gathering.gone(key)
    assert gathering.rest_s(1, 1, 1, 10.0) == 0


def test_who_is_late_is_given_up():
    gathering = known()
    told(gathering, range(4))
    now = 10.0
    while rest_s := gathering.rest_s(4, 4, 4, now):
        now += rest_s
    assert 10.004 <= now <= 10.007


def test_where_every_row_costs_its_share_nothing_is_saved():
    gathering = known(pass_s=0.0005, per_row_s=0.005)
    told(gathering, range(4))
    assert gathering.fixed_s == pytest.approx(0.0005, abs=1e-6)
    assert gathering.rest_s(4, 4, 4, 10.0) == 0


def test_the_cost_of_a_pass_without_rows_is_found_among_prompts_and_trees():
    gathering = Gathering()
    for number in range(200):
        rows = (1, 5, 20, 512)[number % 4]
        gathering.passed(rows, 0.020 + 0.0001 * rows, 0.0)
    assert gathering.fixed_s == pytest.approx(0.020, rel=0.02)


def slowed(times: float, passes: int = 20, rows: int = 6, away_s: float = 0.019) -> Gathering:
    """Passes of 20 ms and, while one of eight is away for its draft, of so many times that. All are here at 10 s; they
    are so long away as a rule, and beside a pass, too."""
    gathering = known(away_s=away_s)
    for number in range(passes):
        gathering.told(0, 2, 5.0 + number)
        gathering.passed(rows, 0.020 * times, 5.0 + number)
        gathering.back(0, 5.0 + away_s + number)
    return gathering


def test_where_drafts_slow_a_pass_down_it_is_worth_waiting_for_more_of_them():
    for gathering, waits in ((slowed(1.0), False), (slowed(1.6), True)):
        told(gathering, range(4), rows=2)
        assert (gathering.rest_s(4, 4, 4, 10.0) > 0) is waits
        assert gathering.fixed_s == pytest.approx(0.020, rel=0.15), "passes that were slowed down tell no more of it"


def test_clients_that_do_not_read_are_no_drafts():
    gathering = slowed(1.0)
    for number in range(20):
        gathering.told(0, 2, 50.0 + number)
        gathering.passed(6, 0.032, 50.9 + number)
        gathering.back(0, 50.019 + number)
    told(gathering, range(4), 100.0, rows=2)
    assert gathering.rest_s(4, 4, 4, 100.0) == 0


def test_who_is_awaited_spares_a_pass_no_more_than_its_share():
    gathering = slowed(1.6)
    told(gathering, range(1), 10.0, rows=2)
    told(gathering, range(1, 4), 10.010, rows=2)
    assert gathering.rest_s(40, 0, 40, 10.010) == 0, "one comes soon, and then three drafts are still being made"


def test_one_slow_pass_is_an_accident():
    gathering = slowed(1.0)
    gathering.told(0, 2, 9.0)
    gathering.passed(6, 0.2, 9.0)
    gathering.back(0, 9.019)
    told(gathering, range(4), rows=2)
    assert gathering.rest_s(4, 4, 4, 10.0) == 0


def test_how_slow_they_are_is_forgotten_while_nobody_is_away():
    gathering = slowed(1.6)
    for _ in range(20_000):
        gathering.passed(6, 0.020, 0.0)
    for _ in range(20):
        gathering.told(0, 2, 9.0)
        gathering.back(0, 9.019)
    told(gathering, range(4), rows=2)
    assert gathering.rest_s(4, 4, 4, 10.0) == 0


def test_what_more_rows_take_is_not_laid_to_those_who_are_away():
    gathering = slowed(3.0, passes=5, rows=50)
    told(gathering, range(4), rows=2)
    assert gathering.rest_s(4, 4, 4, 10.0) == 0


def test_who_is_away_without_a_draft_slows_nobody_down():
    for rows, waits in ((1, False), (2, True)):
        gathering = slowed(1.6, away_s=0.030)
        told(gathering, range(4), rows=rows)
        assert (gathering.rest_s(4, 4, 4, 10.0) > 0) is waits


def test_a_draft_that_a_pass_slows_down_is_back_sooner_where_none_begins():
    """Two halves that take turns: each is away for longer than a pass, as the other's is made meanwhile."""
    gathering = known(pass_s=0.012, away_s=0.008, sequences=4)
    for number in range(40):
        half = range(2 * (number % 2), 2 * (number % 2) + 2)
        for key in half:
            gathering.told(key, 3, 5.0 + 0.017 * number)
        gathering.passed(6, 0.017, 5.0 + 0.017 * number)
        for key in half:
            gathering.back(key, 5.0 + 0.017 * number + 0.016)
    told(gathering, range(2), rows=3)
    assert 0 < gathering.rest_s(2, 2, 6, 10.0) < 0.014


def test_who_is_here_with_many_rows_does_not_take_the_others_for_as_dear():
    """They were ten times as long away for their drafts as a row takes: a guess of one of them changes nothing."""
    gathering = known(pass_s=0.013, per_row_s=0.0002, away_s=0.010, sequences=4)
    for number in range(20):
        gathering.told(0, 4, 5.0 + number)
        gathering.passed(8, 1.3 * (0.013 + 8 * 0.0002), 5.0 + number)
        gathering.back(0, 5.010 + number)
    told(gathering, range(1, 4), rows=4)
    for num_rows in (4, 12, 16):
        assert gathering.rest_s(1, 1, num_rows, 10.0) > 0


@given(
    st.lists(st.tuples(st.integers(0, 600), st.floats(0, 10))),
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10), st.booleans())),
    st.integers(1, 50),
)
def test_the_rest_is_never_negative_nor_longer_than_a_pass(passes, events, num_here):
    gathering, now = Gathering(), 0.0
    for rows, seconds in passes:
        gathering.passed(rows, seconds, 0.0)
    for key, seconds, out in events:
        now += seconds
        if out:
            gathering.told(key, num_here, now)
        else:
            gathering.back(key, now)
        assert (
            0
            <= gathering.rest_s(num_here, num_here, num_here, now)
            <= max([seconds for _, seconds in passes], default=0)
        )


class Hasty(Run):
    """Passes begin at once."""

    def _pass(self) -> None:
        self._gathering = Gathering()
        super()._pass()


@pytest.mark.parametrize("sequences", [2, 4, 16, 32])
def test_it_makes_halves_that_take_turns_one(sequences):
    where = Place(0.7, step_ms=1, sequences=sequences)
    hasty = tokens_per_s(Hasty(where, lambda: Fixed(4)))
    assert tokens_per_s(fixed(where, 4)) > 1.3 * hasty


@pytest.mark.parametrize("distance_ms", [0, 5, 20, 100])
@pytest.mark.parametrize("step_ms", [1, 4, 20])
@pytest.mark.parametrize("sequences", [1, 4, 16])
def test_it_costs_next_to_nothing_where_it_gains_nothing(sequences, step_ms, distance_ms):
    where = Place(0.7, step_ms=step_ms, distance_ms=distance_ms, sequences=sequences)
    hasty = tokens_per_s(Hasty(where, lambda: Fixed(4)), 40, 60)
    assert tokens_per_s(fixed(where, 4), 40, 60) > 0.96 * hasty
