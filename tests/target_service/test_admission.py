"""Which open comes first where there is too little room for all."""

from __future__ import annotations

import pytest

from specdec.core.errors import ContextExceeded, Overloaded
from specdec.core.rounds import TargetOpen
from specdec.core.sequence import SequenceSpec
from specdec.server.step_loop import Key
from target_service.admission import BACK_WITHIN_S, HEADROOM, RETRY_AFTER_S
from target_service.engine import TargetEngine
from testing.misbehaving import MODELS_OWN, Misbehaving
from testing.table_model import Table, TableVerifier

LARGE = 400


class Door:
    """An engine with a clock of its own, and numbered requests. A request keeps its arrival when it tries again."""

    def __init__(self, num_slots: int = 1024, max_sequences: int = 1024) -> None:
        self.now = 1e6
        self.verifier = Misbehaving(TableVerifier(Table(), num_slots))
        self.engine = TargetEngine(self.verifier, max_sequences, lambda: self.now)
        self.arrived: dict[int, float] = {}
        self.inside: list[int] = []

    def lets_in(self, number: int, length: int = 100) -> bool:
        arrived = self.arrived.setdefault(number, self.now)
        spec = SequenceSpec((number,) * length, length, seed=number)
        try:
            self.engine.open(Key(1, number), TargetOpen(spec, age_s=self.now - arrived))
        except Overloaded:
            self.engine.close(Key(1, number))  # as the step loop does
            return False
        self.inside.append(number)
        return True

    def goes(self, number: int) -> None:
        self.inside.remove(number)
        self.engine.close(Key(1, number))

    def fill(self, first: int = 100) -> None:
        while self.lets_in(first):
            first += 1

    def forget(self) -> None:
        self.now += 2 * BACK_WITHIN_S


@pytest.fixture
def full() -> Door:
    """Seven sequences of 132 slots each, in 1024; none waits."""
    door = Door()
    door.fill()
    door.forget()
    assert len(door.inside) == 7
    return door


def test_a_large_open_is_served_though_small_ones_keep_coming(full):
    number = 1000
    tries = 1
    while not full.lets_in(0, LARGE):
        tries += 1
        assert tries <= 5, "by then three have gone"
        full.goes(full.inside[0])
        full.fill(number := number + 10)
        full.now += RETRY_AFTER_S


def test_where_there_is_room_for_both_none_waits_for_the_large_one(full):
    assert not full.lets_in(0, LARGE)
    for gone in full.inside[:4]:
        full.goes(gone)
    # 628 slots are free, 432 of which are spoken for.
    assert full.lets_in(1)
    assert not full.lets_in(2)
    assert full.lets_in(0, LARGE)
    assert not full.lets_in(2)


def test_of_those_that_wait_the_oldest_is_first(full):
    full.arrived |= {1: full.now - 20, 2: full.now - 30, 3: full.now - 10}
    assert not any(full.lets_in(number, LARGE) for number in (1, 2, 3))
    for gone in full.inside[:3]:
        full.goes(gone)
    assert [full.lets_in(number, LARGE) for number in (1, 3, 2)] == [False, False, True]
    for gone in full.inside[:3]:
        full.goes(gone)
    assert not full.lets_in(3, LARGE + 200), "it does not fit, but it is the only one that waits"
    assert full.lets_in(1, LARGE), "it is older"


def test_an_open_older_than_all_that_wait_needs_no_more_than_room(full):
    full.arrived[1] = full.now - 100
    assert not full.lets_in(0, LARGE)
    full.goes(full.inside[0])
    assert not full.lets_in(2)
    assert full.lets_in(1)


def test_room_is_not_kept_for_an_open_that_does_not_come_back(full):
    assert not full.lets_in(0, LARGE)
    full.goes(full.inside[0])
    full.now += BACK_WITHIN_S
    assert not full.lets_in(1)
    full.now += 0.01
    assert full.lets_in(1)


def test_room_is_kept_for_an_open_that_comes_back_between_long_passes(full):
    """Opens are taken in between passes, and a pass may last longer than room is kept."""

    def slow(job):
        full.now += 3.0 / len(full.inside)
        return MODELS_OWN

    full.verifier.instead = slow
    assert not full.lets_in(0, LARGE)
    full.engine.step()
    full.goes(full.inside[0])
    full.now += RETRY_AFTER_S
    assert not full.lets_in(1)
    full.now += BACK_WITHIN_S
    assert full.lets_in(1)


def test_an_open_that_comes_back_late_and_seems_younger_keeps_its_place(full):
    """Its age does not include the time it waited here for a pass to end."""
    full.arrived |= {0: full.now, 1: full.now + 0.1}
    assert not full.lets_in(0, LARGE)
    full.arrived[0] += 0.2
    full.now += RETRY_AFTER_S
    assert not full.lets_in(0, LARGE)
    full.goes(full.inside[0])
    assert not full.lets_in(1)


def test_places_are_kept_free_as_slots_are():
    door = Door(max_sequences=2)
    assert door.lets_in(1)
    assert door.lets_in(2)
    door.now += 1
    assert not door.lets_in(0)
    door.now += RETRY_AFTER_S
    door.goes(1)
    assert not door.lets_in(3)
    assert door.lets_in(0)
    door.forget()
    door.goes(2)
    assert door.lets_in(3)


def test_a_text_that_fits_only_alone_gets_the_pool_for_itself(full):
    """Longer than could ever have room to grow beside it, so all others have to go first."""
    length = 1024 - HEADROOM // 2
    while full.inside:
        assert not full.lets_in(0, length)
        assert not full.lets_in(1)
        full.goes(full.inside[0])
        full.now += RETRY_AFTER_S
    assert not full.lets_in(1), "the pool is empty, but it would be in the way"
    assert full.lets_in(0, length)


def test_a_text_that_never_fits_does_not_wait(full):
    full.engine.close(Key(1, full.inside.pop()))
    with pytest.raises(ContextExceeded):
        full.lets_in(0, 1024)
    assert full.lets_in(1)
