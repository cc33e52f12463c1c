"""Which sequences a pass takes: by priority, by turns between streams and within one, and by age."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from specdec.core.sequence import Priority
from specdec.server.step_loop import Key
from specdec.server.turns import AGED_S, Turns, Wait

INTERACTIVE, STANDARD, BATCH = Priority


def _line(*sizes: int, stream: int = 1, priority: Priority = STANDARD) -> dict[Key, Wait]:
    return {Key(stream, number): Wait(size, priority) for number, size in enumerate(sizes)}


@given(st.lists(st.integers(1, 20), max_size=20), st.integers(1, 30))
def test_each_sequence_has_a_turn_before_any_has_two(sizes, max_rows):
    turns, waits = Turns(), _line(*sizes)
    line = dict.fromkeys([*waits, Key(9, 9)])
    num_turns = dict.fromkeys(waits, 0)
    while 0 in num_turns.values():
        taken = turns.take(line, waits, max_rows)
        assert sum(waits[key].rows for key in taken) <= max(max_rows, waits[taken[0]].rows)
        for key in taken:
            num_turns[key] += 1
    assert set(line) == {*waits, Key(9, 9)}
    assert max(num_turns.values(), default=1) <= 2


def test_sequences_that_all_fit_keep_their_places_in_the_line():
    waits = _line(3, 3, 3)
    line = dict.fromkeys(waits)
    assert Turns().take(line, waits, 9) == list(line) == list(waits)
    assert Turns().take(line, {}, 6) == []


@given(st.lists(st.integers(1, 4), min_size=40, max_size=40), st.integers(4, 16))
def test_streams_have_equal_shares_however_many_sequences_they_have(sizes, max_rows):
    few = _line(*sizes[:10], stream=1)
    many = _line(*sizes[10:], stream=2)
    turns, line, rows = Turns(), dict.fromkeys([*many, *few]), Counter()
    for _ in range(200):
        for key in turns.take(line, few | many, max_rows if max_rows < 10 else 9):
            rows[key.stream] += (few | many)[key].rows
    assert abs(rows[1] - rows[2]) <= 4 * 2


def test_a_stream_that_comes_back_has_saved_nothing():
    one, other = _line(1, 1, stream=1), _line(1, 1, stream=2)
    turns, line = Turns(), dict.fromkeys([*one, *other])
    for _ in range(100):
        turns.take(line, one, 1)
    taken = Counter(key.stream for _ in range(10) for key in turns.take(line, one | other, 1))
    assert taken == {1: 5, 2: 5}


def test_a_full_pass_leaves_out_batch_first_and_standard_next():
    waits = {
        Key(1, number): Wait(1, priority)
        for number, priority in enumerate([BATCH] * 3 + [STANDARD] * 3 + [INTERACTIVE] * 3)
    }

    def left_out(max_rows: int) -> Counter[Priority]:
        taken = Turns().take(dict.fromkeys(waits), waits, max_rows)
        return Counter(waits[key].priority for key in waits if key not in taken)

    assert left_out(9) == {}
    assert left_out(7) == {BATCH: 2}
    assert left_out(5) == {BATCH: 3, STANDARD: 1}
    assert left_out(2) == {BATCH: 3, STANDARD: 3, INTERACTIVE: 1}


def test_none_passes_one_of_a_higher_priority_for_being_smaller():
    waits = {Key(1, 1): Wait(4, INTERACTIVE), Key(1, 2): Wait(4, INTERACTIVE), Key(1, 3): Wait(1, BATCH)}
    assert Turns().take(dict.fromkeys(waits), waits, 6) == [Key(1, 1)]


def test_what_has_waited_for_long_is_urgent():
    waits = {Key(1, number): Wait(1, INTERACTIVE) for number in range(4)}
    waits[Key(2, 1)] = Wait(1, BATCH, waited_s=AGED_S + 0.1)
    assert Key(2, 1) in Turns().take(dict.fromkeys(waits), waits, 2)


def test_of_many_that_have_waited_for_long_those_are_urgent_that_have_waited_for_longest():
    waits = {Key(1, number): Wait(1, BATCH, waited_s=AGED_S + number) for number in range(1, 9)}
    waits[Key(2, 1)] = Wait(1, STANDARD)
    taken = Turns().take(dict.fromkeys(waits), waits, 9, affords=lambda _: False)
    assert {*taken} == {Key(2, 1), *(Key(1, number) for number in range(5, 9))}


def test_batch_sequences_join_others_as_far_as_they_can_afford_and_alone_they_pay_nothing():
    batch, others = _line(*[1] * 10, stream=1, priority=BATCH), _line(1, stream=2)
    asked: list[Key] = []

    def affords(key: Key) -> bool:
        asked.append(key)
        return len(asked) <= 3

    turns, line = Turns(), dict.fromkeys([*batch, *others])
    taken = turns.take(line, batch | others, 100, affords=affords)
    assert taken == [Key(2, 0), *list(batch)[:3]]
    assert list(line)[-3:] == list(batch)[:3], "they go to the end of the line"
    asked.clear()
    assert turns.take(line, batch, 100, affords=affords)
    assert asked == []
