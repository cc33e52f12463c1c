"""When a pass begins: sequences that are about to return are waited for where that saves more than it costs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.control.controller import Fixed
from specdec.server.batch_delay import BatchDelay
from testing.round_simulation import Place, Run, fixed, tokens_per_s


def measured(
    fixed_s: float = 0.020, per_row_s: float = 0.0, away_s: float = 0.004, sequences: int = 8, absent: int = 0
) -> BatchDelay:
    """All sequences are usually away for ``away_s``, and ``absent`` of them left at 10 s."""
    delay = BatchDelay()
    for number in range(40):
        rows = 4 + number % 5
        delay.observe_pass(rows, fixed_s + per_row_s * rows)
    for key in range(sequences):
        for number in range(4):
            delay.left(key, number)
            delay.returned(key, number + away_s)
    for key in range(absent):
        delay.left(key, 10.0)
    return delay


@pytest.mark.parametrize(
    ("options", "waits"),
    [
        # In turns a round takes two passes of 20 ms, together one and the time that they are away.
        (dict(away_s=0.004), True),
        (dict(away_s=0.021), False),
        (dict(fixed_s=0.0005), False),  # short passes are not delayed
        (dict(fixed_s=0.0005, per_row_s=0.005), False),  # every row costs its share
    ],
)
def test_a_half_that_is_soon_back_is_waited_for_where_that_makes_rounds_shorter(options, waits):
    assert (measured(**options, absent=4).delay_s(4, 4, 10.0) > 0) is waits


def test_the_delay_ends_once_the_others_are_back_removed_or_late():
    delay, now = measured(absent=4), 10.0
    while wait_s := delay.delay_s(4, 4, now):
        now += wait_s
    assert 10.004 <= now <= 10.009, "late ones are given up"
    delay = measured(absent=4)
    for key in range(2):
        delay.returned(key, 10.004)
        delay.removed(key + 2)
    assert delay.delay_s(8, 8, 10.004) == 0


def test_sequences_that_return_one_after_another_do_not_put_a_pass_off_again_and_again():
    delay, now = measured(away_s=0.015, sequences=40), 10.0
    for key in range(40):
        delay.left(key, now + 0.012 * key)
        wait_s = delay.delay_s(key + 1, key + 1, now + 0.012 * key)
        assert not wait_s or 0.012 * key + wait_s <= 0.020
    delay.observe_pass(5, 0.020)
    assert delay.delay_s(4, 4, now + 0.012 * 39) > 0, "the next pass has its own cap"


def test_many_wait_for_one_only_if_it_will_be_in_their_passes_from_then_on():
    """Sequences that leave after the pass are back together; the others (autonomous decoding) are in every pass."""
    delay = measured(absent=1)
    assert delay.delay_s(7, 0, 10.0) == 0
    assert delay.delay_s(7, 7, 10.0) > 0


def test_a_sequence_of_which_nothing_is_known_is_not_waited_for():
    delay = measured(sequences=0)
    delay.left("new", 10.0)
    assert delay.delay_s(1, 1, 10.0) == 0


def test_the_fixed_time_of_a_pass_is_found_among_prompts_and_trees():
    delay = BatchDelay()
    for number in range(200):
        rows = (1, 5, 20, 512)[number % 4]
        delay.observe_pass(rows, 0.020 + 0.0001 * rows)
    assert delay.fixed_s == pytest.approx(0.020, rel=0.02)


@given(
    st.lists(st.tuples(st.integers(0, 600), st.floats(0, 10))),
    st.lists(st.tuples(st.integers(0, 5), st.floats(0, 10), st.booleans())),
    st.integers(1, 50),
)
def test_the_delay_is_never_negative_nor_longer_than_a_pass(passes, events, num_here):
    delay, now = BatchDelay(), 0.0
    for rows, seconds in passes:
        delay.observe_pass(rows, seconds)
    for key, seconds, leaves in events:
        now += seconds
        if leaves:
            delay.left(key, now)
        else:
            delay.returned(key, now)
        assert 0 <= delay.delay_s(num_here, num_here, now) <= max([seconds for _, seconds in passes], default=0)


class Hasty(Run):
    """Passes begin at once."""

    def _pass(self) -> None:
        self._batch_delay = BatchDelay()
        super()._pass()


@pytest.mark.parametrize("sequences", [2, 16])
def test_two_halves_that_take_turns_become_one(sequences):
    where = Place(0.7, step_ms=1, sequences=sequences)
    assert tokens_per_s(fixed(where, 4)) > 1.3 * tokens_per_s(Hasty(where, lambda: Fixed(4)))


@pytest.mark.parametrize(("step_ms", "distance_ms"), [(1, 0), (4, 5), (20, 20), (1, 100)])
@pytest.mark.parametrize("sequences", [1, 4, 16])
def test_it_costs_next_to_nothing_where_it_gains_nothing(sequences, step_ms, distance_ms):
    where = Place(0.7, step_ms=step_ms, distance_ms=distance_ms, sequences=sequences)
    hasty = tokens_per_s(Hasty(where, lambda: Fixed(4)), 40, 60)
    assert tokens_per_s(fixed(where, 4), 40, 60) > 0.96 * hasty
