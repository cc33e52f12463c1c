"""What requests learnt together under one load, under another."""

from __future__ import annotations

from orchestrator.control.concert import Turn
from specdec.core.rounds import Timings
from tests.orchestrator.control.concerts import concert_of, turns


def test_under_another_load_what_was_promised_before_is_forgotten():
    concert = concert_of()
    rising = [1.0 + 0.1 * depth for depth in range(9)]
    for now in range(16):
        concert.turn(1.8, rising, depth=4, num_rounds=99)
        concert.passed(now)
    assert concert.num_draft_tokens > 4
    concert.costs.went_on(Timings(0, 40_000, 0, 32, 32), 32)
    assert concert.turn(1.1, [1.0, 1.1, *[0.5] * 7], depth=4, num_rounds=99) is Turn.DRAFT
    assert concert.num_draft_tokens == 1


def test_under_each_load_they_rest_for_what_was_lost_there():
    concert = concert_of(sequences=16)
    last = turns(concert, 0.5)
    while Turn.TRY in last:
        last = turns(concert, 0.5, last=last)
    assert last == [Turn.REST] * 16
    concert.costs.went_on(Timings(0, 20_000, 0, 4, 4), 4)
    assert Turn.TRY in turns(concert, 0.5), "nothing is known of four"
    concert.costs.went_on(Timings(0, 20_001, 0, 16, 16), 16)
    assert turns(concert, 0.5) == [Turn.REST] * 16


def test_under_another_load_drafts_begin_with_few_tokens_again():
    """What one request was drafting with is too much for four."""
    concert = concert_of(sequences=1)
    promised = [1.0, 1.2, 1.4, 1.6, 1.8, 2.0, 2.2, 2.4, 2.6]
    for now in range(12):
        concert.turn(2.6, promised, depth=4, num_rounds=99)
        concert.passed(now)
    assert concert.num_draft_tokens == 8
    concert.costs.went_on(Timings(0, 20_000, 0, 4, 4), 4)
    concert.turn(2.6, promised, depth=4, num_rounds=99)
    assert concert.num_draft_tokens == 2


def test_what_the_target_takes_alone_is_not_looked_at_anew_after_every_pause():
    concert = concert_of()
    num_looks, looked = [], False
    for number in range(300):
        # A load under which they do not draft comes between.
        drafts = number % 30 < 28
        found = turns(concert, 1.3 if drafts else 0.5)[0]
        looked = looked or (drafts and found is Turn.CHECK)
        concert.costs.went_on(Timings(0, 20_000 + number, 0, *[4 if drafts else 40] * 2), 4 if drafts else 40)
        if number % 30 == 29:
            num_looks.append(looked)
            looked = False
    assert num_looks[0], "nothing was seen yet"
    assert not any(num_looks[3:]), "28 passes are few by now"


def test_drafts_that_would_not_begin_under_another_load_end_at_once():
    """Under the same load they go on for a while, as a promise may be wrong."""
    for jumps in (False, True):
        concert = concert_of()
        turns(concert, 1.8)
        if jumps:
            concert.costs.went_on(Timings(0, 40_000, 0, 32, 32), 32)
        assert turns(concert, 1.04) == [Turn.REST if jumps else Turn.DRAFT] * concert.costs.everybody
