"""Requests begin, stop, try and look together, and a trial is paid for before it begins."""

from __future__ import annotations

import pytest

from orchestrator.control.concert import FIRST_PAUSE, Turn
from orchestrator.control.controller import Adaptive
from orchestrator.rounds import Proposal, RoundPlan
from specdec.core.rounds import OVERRUN, Budget, Timings, Verdict
from tests.models.fake_peers import new_sequence, still_to_come
from tests.orchestrator.control.concerts import concert_of, turns


def test_all_begin_together_once_the_mean_of_their_promises_is_worth_it():
    concert = concert_of()
    assert turns(concert, 1.5) == [Turn.DRAFT] * 4


def test_all_try_together_and_then_rest_twice_as_long_each_time():
    concert = concert_of()
    seen = [turns(concert, 0.5)]
    for _ in range(199):
        seen.append(turns(concert, 0.5, last=seen[-1]))
    assert all(len(set(each)) == 1 for each in seen)
    tried = [number for number, each in enumerate(seen) if each[0] is Turn.TRY]
    assert tried[:10] == [0, 1, 10, 11, 28, 29, 62, 63, 128, 129]


def test_what_those_gain_who_did_not_try_does_not_end_the_rest():
    concert = concert_of(sequences=16)
    last = turns(concert, 0.9)
    for each in last:
        concert.book(-0.1 if each is Turn.TRY else 0.2, tries=each is Turn.TRY)
    last = turns(concert, 0.9, last=last)
    assert turns(concert, 0.9, last=last) == [Turn.REST] * 16


def test_no_more_try_in_the_next_trial_than_in_the_first():
    concert = concert_of(sequences=16)
    tried, last = [-1] * 16, [Turn.REST] * 16
    for _ in range(8):
        for index in range(16):
            last[index] = concert.turn(0.9, [1.0, *[0.9] * 8], 4, 99, tried[index] == concert.num_trials)
            if last[index] is Turn.TRY:
                tried[index] = concert.num_trials
                concert.book(0.1, tries=True)
        concert.passed(concert.now)
        assert last.count(Turn.TRY) == 4


def test_of_many_a_few_try_and_the_same_until_it_is_over():
    concert = concert_of(sequences=16)
    first = turns(concert, 0.5)
    assert [each is Turn.TRY for each in first] == [True] * 4 + [False] * 12
    assert concert.costs.few_draft
    assert concert.call(4, 99, tries=False) is Turn.REST, "the others need not be asked until it is over"
    second = turns(concert, 0.5, last=first)
    assert second == first
    assert turns(concert, 0.5, last=second) == [Turn.REST] * 16
    assert concert.costs.few_draft, "whose verdict may still come"
    while turns(concert, 1.5)[0] is not Turn.DRAFT:
        pass
    assert not concert.costs.few_draft


@pytest.mark.parametrize("waits", [True, False])
def test_where_nobody_waits_no_more_texts_are_tried_than_a_draft_takes_in_within_a_pass(waits):
    concert = concert_of(sequences=16, ahead=True)
    for _ in range(64):
        concert.costs.foreseen(not waits, waits=False)
    turns(concert, 1.05, young=True)
    first = turns(concert, 1.05)
    assert concert.waits is waits
    assert first.count(Turn.TRY) == (16 if waits else 4)


def test_before_they_stop_all_look_whether_it_is_the_target_that_is_slower():
    concert = concert_of()
    for _ in range(24):
        last = turns(concert, 1.3)[-1]
    assert last is Turn.DRAFT
    seen = [turns(concert, 0.5)[-1] for _ in range(9)]
    assert Turn.CHECK in seen
    assert seen.index(Turn.CHECK) < seen.index(Turn.REST)


def test_the_fewest_draft_tokens_are_enough_that_promise_about_as_much():
    concert = concert_of()
    for now in range(12):
        concert.turn(1.5, [1.0, 1.3, 1.47, 1.49, 1.5, 1.49, 1.4, 1.3, 1.2], depth=4, num_rounds=99)
        concert.passed(now)
    assert concert.num_draft_tokens == 2


def test_what_cannot_be_paid_for_is_not_tried():
    concert = concert_of()
    concert.costs.savings.book(-concert.costs.savings.rounds)
    for _ in range(FIRST_PAUSE + 1):
        assert concert.call(4, 99, tries=False) is Turn.REST
        assert turns(concert, 0.5) == [Turn.REST] * 4


def test_who_goes_on_unasked_is_called_when_its_turn_comes():
    """As soon before as it takes until nothing comes unasked any more, and nobody for whom there is no room."""
    concert = concert_of(sequences=16)
    last = None
    for _ in range(3):
        last = turns(concert, 0.9, last=last)
    assert last == [Turn.REST] * 16
    pause = 0
    while concert.call(4, 99, tries=False) is Turn.REST:
        pause += 1
        concert.passed(concert.now)
    assert pause == FIRST_PAUSE - 1 - OVERRUN
    called = [Turn.TRY] + [concert.call(4, 99, tries=False) for _ in range(15)]
    assert called.count(Turn.TRY) == 4
    assert concert.call(4, 2, tries=False) is Turn.REST, "it may be short"
    for _ in range(OVERRUN):
        concert.passed(concert.now)
        assert [concert.call(4, 99, each is Turn.TRY) for each in called] == called
    for _ in range(2):
        assert turns(concert, 0.9, last=called) == called, "the trial begins only now"
    assert turns(concert, 0.9, last=called) == [Turn.REST] * 16


def test_all_are_called_once_the_others_draft():
    concert = concert_of()
    turns(concert, 1.5)
    assert concert.call(4, 2, tries=False) is Turn.DRAFT


def test_a_gain_ends_the_rest_after_a_trial():
    concert = concert_of()
    last = None
    for _ in range(2):
        last = turns(concert, 0.9, last=last)
        assert last[0] is Turn.TRY
        for _ in last:
            concert.book(0.1, tries=True)
    assert turns(concert, 0.9)[0] is Turn.TRY


def test_who_has_just_begun_tries_nothing_but_drafts_with_the_others():
    concert = concert_of()
    assert turns(concert, 0.5, young=True) == [Turn.REST] * 4
    assert concert.turn(0.5, [0.5] * 9, depth=4, num_rounds=99) is Turn.TRY
    assert concert.turn(0.5, [0.5] * 9, depth=4, num_rounds=2) is Turn.REST
    other = concert_of()
    assert turns(other, 1.5, young=True) == [Turn.DRAFT] * 4


def test_all_stop_together_when_they_promise_too_little():
    concert = concert_of()
    for _ in range(3):
        turns(concert, 1.5)
    seen = [turns(concert, 0.5)[-1] for _ in range(6)]
    assert Turn.REST in seen[2:]
    assert turns(concert, 0.5) == [Turn.REST] * 4


def test_the_more_is_lost_the_sooner_all_stop():
    def passes_until_it_stops(promise: float) -> int:
        concert = concert_of()
        turns(concert, 1.5)
        return next(number for number in range(1, 20) if turns(concert, promise)[-1] is Turn.REST)

    assert passes_until_it_stops(0.5) == 1
    assert 1 < passes_until_it_stops(0.99) <= 3 < passes_until_it_stops(1.04) < 20


@pytest.mark.parametrize("everybody", [1, 4])
def test_several_requests_draft_few_tokens_first_and_more_once_they_have_settled(everybody):
    concert = concert_of()
    concert.costs.went_on(Timings(0, 20_000, 0, everybody, everybody), everybody)
    rising = [1.0 + 0.1 * depth for depth in range(9)]
    numbers = []
    for _ in range(10):
        for _ in range(everybody):
            concert.turn(1.8, rising, depth=4, num_rounds=99)
        numbers.append(concert.num_draft_tokens)
        concert.passed(concert.now)
    assert numbers == ([4, 5, 6, 7, 8, 8, 8, 8, 8, 8] if everybody == 1 else [2, 2, 2, 3, 3, 3, 4, 4, 4, 5])


def test_all_of_a_pass_do_the_same_also_where_the_doubts_of_one_of_them_are_the_last_straw():
    concert = concert_of()
    turns(concert, 1.8)
    for _ in range(40):
        assert len(set(turns(concert, 1.02))) == 1


@pytest.mark.parametrize("ahead", [False, True])
def test_all_look_at_the_target_alone_together_until_it_was_seen(ahead):
    concert = concert_of(ahead=ahead)
    seen = []
    for number in range(70):
        found = turns(concert, 1.3)
        seen.append(found[0])
        assert len(set(found)) == 1
        if found[0] is Turn.DRAFT:
            concert.costs.contention.asked()
        timings = Timings(0, 20_000 + number, 0, 4, 4)
        concert.costs.went_on(timings, 4)
    lengths = [len(run) for run in "".join("c" if each is Turn.CHECK else " " for each in seen).split()]
    assert len(lengths) == 3, "after 8, 16 and 32 passes"
    assert set(lengths) == {1 + ahead}


def test_whose_target_is_slower_is_in_the_pass_of_the_quickest():
    concert, slow, quick = concert_of(), 0, 0
    for number in range(1, 20):
        quick = concert.passed(quick)
        assert quick == number
        if number % 3 == 0:
            slow = concert.passed(slow)
            assert slow == quick


def test_who_is_new_and_alone_begins_afresh():
    concert = concert_of(1)
    turns(concert, 0.5)
    assert turns(concert, 0.5) == [Turn.REST]
    assert concert.turn(1.5, [1.5] * 9, depth=4, num_rounds=1) is Turn.DRAFT


def test_whose_draft_grows_ahead_begins_when_it_is_called_and_finds_a_tree():
    concert = concert_of(sequences=1, ahead=True)
    controller, sequence = Adaptive(concert, ahead=True), new_sequence(max_tokens=1000)
    unasked, last, num_called = 0, RoundPlan(Budget()), 0
    for number in range(200):
        plan = controller.plan(sequence)
        assert plan.soon == (unasked > 0 and plan.budget.max_depth > 0)
        if plan.soon:
            expected = RoundPlan(Budget(0, concert.num_draft_tokens), run_on=0, soon=True, rounds=plan.rounds)
            assert plan == expected
            num_called += not last.soon
        elif last.soon:
            assert plan.budget.max_depth, "its turn has come"
        unasked, last = still_to_come(unasked, plan.run_on) if unasked else plan.run_on, plan
        timings = Timings(0, 20_000, 0, 1, 1)
        controller.observe(Proposal(), Verdict(number, 0, (), 7, (), timings, run_on=unasked))
    assert num_called > 1


def test_a_trial_that_took_everybody_longer_than_reckoned_is_not_repeated_soon():
    """By the clock: of ten rounds of everybody in vain, 256 passes remain at most; else the next would be 10 later."""
    concert = concert_of()
    last = turns(concert, 0.5)
    assert last == [Turn.TRY] * 4
    for _ in range(4):
        concert.took(11 * concert.costs.alone_s, 1)
    last = turns(concert, 0.5, last=last)
    until = concert.now + 256
    while (last := turns(concert, 0.5))[0] is Turn.REST:
        pass
    assert until <= concert.now <= until + 2 * 64


def test_what_others_take_outside_of_a_trial_puts_off_none():
    concert = concert_of()
    last = turns(concert, 0.5)
    seen = [last, *(turns(concert, 0.5, last=last) for _ in range(4))]
    assert seen[-1] == [Turn.REST] * 4
    for _ in range(4):
        concert.took(11 * concert.costs.alone_s, 1)
    assert any(turns(concert, 0.5)[0] is Turn.TRY for _ in range(10))
