"""When a pass begins: sequences that are about to return are waited for where that saves more than it costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.control.simulation import Place, Run, fixed, tokens_per_s
from orchestrator.control.controller import Fixed
from specdec.server.batch_delay import Gathering


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


def slowed(times: float, passes: int = 20, rows: int = 6, away_s: float = 0.019) -> Gathering:
    """Passes of 20 ms and, while one of eight sequences is away for its draft, of ``times`` that. All are here at 10 s.

    Each is usually away for ``away_s``, also while a pass runs."""
    gathering = known(away_s=away_s)
    for number in range(passes):
        gathering.told(0, 2, 5.0 + number)
        gathering.passed(rows, 0.020 * times, 5.0 + number)
        gathering.back(0, 5.0 + away_s + number)
    return gathering


def after_one_slow_pass() -> Gathering:
    gathering = slowed(1.0)
    gathering.told(0, 2, 9.0)
    gathering.passed(6, 0.2, 9.0)
    gathering.back(0, 9.019)
    return gathering


def after_many_passes_with_all_of_them() -> Gathering:
    gathering = slowed(1.6)
    for _ in range(20_000):
        gathering.passed(6, 0.020, 0.0)
    for _ in range(20):
        gathering.told(0, 2, 9.0)
        gathering.back(0, 9.019)
    return gathering


def after_slow_passes_without_drafts() -> Gathering:
    """Clients that read late are away as well."""
    gathering = slowed(1.0)
    for number in range(20):
        gathering.told(0, 2, 6.0 + number / 8)
        gathering.passed(6, 0.032, 6.1 + number / 8)
        gathering.back(0, 6.019 + number / 8)
    return gathering


@pytest.mark.parametrize(
    ("gathering", "rows", "waits"),
    [
        # In turns a round takes two passes of 20 ms, together one and the time that they are away.
        (lambda: known(away_s=0.004), 1, True),
        (lambda: known(away_s=0.015), 1, True),
        (lambda: known(away_s=0.019), 1, False),
        (lambda: known(pass_s=0.0005, per_row_s=0.005), 1, False),  # every row costs its share
        # A pass is shorter while no draft is computed beside it.
        (lambda: slowed(1.0), 2, False),
        (lambda: slowed(1.6), 2, True),
        (lambda: slowed(1.6, away_s=0.030), 2, True),
        (lambda: slowed(1.6, away_s=0.030), 1, False),  # away without a draft
        # Passes were slow for another reason, or long ago.
        (lambda: slowed(3.0, passes=5, rows=50), 2, False),
        (after_one_slow_pass, 2, False),
        (after_many_passes_with_all_of_them, 2, False),
        (after_slow_passes_without_drafts, 2, False),
    ],
)
def test_a_half_that_is_soon_back_is_waited_for_where_that_makes_rounds_shorter(gathering, rows, waits):
    gathering = gathering()
    told(gathering, range(4), rows=rows)
    assert (gathering.rest_s(4, 4, 4, 10.0) > 0) is waits


def test_the_wait_is_as_long_as_the_others_are_usually_away_and_ends_once_they_are_back_or_gone():
    gathering = known()
    told(gathering, range(4))
    assert gathering.rest_s(4, 4, 4, 10.0) == pytest.approx(0.004)
    now = 10.0
    while rest_s := gathering.rest_s(4, 4, 4, now):
        now += rest_s
    assert 10.004 <= now <= 10.007, "late ones are given up"
    for key in range(2):
        gathering.back(key, 10.004)
        gathering.gone(key + 2)
    assert gathering.rest_s(8, 8, 8, 10.004) == 0


def test_many_wait_for_one_only_if_it_will_be_in_their_passes_from_then_on():
    """Sequences that leave after the pass are back together; the others are in every pass anyway."""
    gathering = known()
    told(gathering, range(1))
    assert gathering.rest_s(7, 0, 7, 10.0) == 0
    assert gathering.rest_s(1, 0, 1, 10.0) > 0
    assert gathering.rest_s(7, 7, 7, 10.0) == pytest.approx(0.004)


def test_sequences_that_are_away_for_longer_than_a_pass_are_not_waited_for():
    gathering = known(away_s=0.021)
    told(gathering, range(7))
    assert gathering.rest_s(1, 1, 1, 10.0) == 0


def test_a_new_sequence_is_expected_as_the_others_are_if_there_were_some():
    gathering = known()
    gathering.told("new", 1, 10.0)
    assert gathering.rest_s(1, 1, 1, 10.0) == pytest.approx(0.004)
    assert gathering.rest_s(1, 1, 1, 10.007) == 0, "it is late, as they would be"
    fresh = known(sequences=0)
    fresh.told("new", 1, 10.0)
    assert fresh.rest_s(1, 1, 1, 10.0) == 0


def test_the_fixed_cost_of_a_pass_is_found_among_prompts_and_trees_and_slow_passes():
    gathering = Gathering()
    for number in range(200):
        rows = (1, 5, 20, 512)[number % 4]
        gathering.passed(rows, 0.020 + 0.0001 * rows, 0.0)
    assert gathering.fixed_s == pytest.approx(0.020, rel=0.02)
    assert known(pass_s=0.0005, per_row_s=0.005).fixed_s == pytest.approx(0.0005, abs=1e-6)
    assert slowed(1.6).fixed_s == pytest.approx(0.020, rel=0.15)


def test_one_of_several_drafts_spares_a_pass_no_more_than_its_share():
    gathering = slowed(1.6)
    told(gathering, range(1), 10.0, rows=2)
    told(gathering, range(1, 4), 10.010, rows=2)
    assert gathering.rest_s(40, 0, 40, 10.010) == 0, "one comes soon, and then three drafts are still being made"


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


def test_the_rows_that_are_here_do_not_count_as_those_of_the_sequences_that_are_away():
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


@pytest.mark.parametrize("sequences", [2, 16])
def test_two_halves_that_take_turns_become_one(sequences):
    where = Place(0.7, step_ms=1, sequences=sequences)
    hasty = tokens_per_s(Hasty(where, lambda: Fixed(4)))
    assert tokens_per_s(fixed(where, 4)) > 1.3 * hasty


@pytest.mark.parametrize(("step_ms", "distance_ms"), [(1, 0), (4, 5), (20, 20), (1, 100)])
@pytest.mark.parametrize("sequences", [1, 4, 16])
def test_it_costs_next_to_nothing_where_it_gains_nothing(sequences, step_ms, distance_ms):
    where = Place(0.7, step_ms=step_ms, distance_ms=distance_ms, sequences=sequences)
    hasty = tokens_per_s(Hasty(where, lambda: Fixed(4)), 40, 60)
    assert tokens_per_s(fixed(where, 4), 40, 60) > 0.96 * hasty
