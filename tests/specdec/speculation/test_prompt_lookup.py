"""What the finder finds is what a reading of the whole text would find; what it is worth is what came true."""

from __future__ import annotations

import random

from hypothesis import example, given
from hypothesis import strategies as st

from specdec.core.limits import MAX_DRAFT_TOKENS
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.speculation import prompt_lookup
from specdec.speculation.acceptance import AcceptanceRate
from specdec.speculation.prompt_lookup import HitRates, PromptLookup
from tests.models.fake_peers import hit_rates

LONGEST, SHORTEST = 16, 2


def proposal_of(ids: list[int], count: int) -> list[int]:
    """The longest earlier occurrence of the end (up to 16 tokens), of those the latest, and what followed it."""
    best, source = SHORTEST - 1, None
    for end in range(len(ids) - 1, 0, -1):
        agreed = 0
        while agreed < min(end, LONGEST) and ids[end - 1 - agreed] == ids[len(ids) - 1 - agreed]:
            agreed += 1
        if agreed > best:
            best, source = agreed, end
    if source is None:
        return []
    text = list(ids)
    for offset in range(count):
        text.append(text[source + offset])
    return text[len(ids) :]


def found(lookup: PromptLookup, ids: list[int], count: int = 8) -> list[int]:
    return list(lookup.propose(min(count, len(lookup.chances(ids)))).token_ids)


# 256 and 257 have the fingerprints of 0 and 1.
@given(
    st.lists(st.sampled_from([0, 1, 2, 256, 257]), min_size=1, max_size=24) | st.lists(st.integers(0, 3), min_size=1)
)
@example([1, 2, 3, 4, 1, 2, 3, 5, 6, 2, 3])
@example([7, 7, 7])
@example([9, 1, 1, 1, 1, 8, 9, 1, 1, 1])
def test_a_fresh_look_finds_what_reading_everything_would(ids):
    assert found(PromptLookup(hit_rates(0.95)), ids) == proposal_of(ids, 8)


@given(st.lists(st.integers(0, 3), max_size=60), st.lists(st.integers(1, 5), max_size=20))
def test_a_lookup_proposal_is_kept_while_it_comes_true_and_searched_anew_when_it_does_not(ids, steps):
    lookup, length, proposal = PromptLookup(hit_rates(0.95)), 0, []
    for step in steps:
        came = ids[length : length + step]
        length += len(came)
        true = bool(proposal) and proposal[: len(came)] == came
        expected = proposal[len(came) :] if true else proposal_of(ids[:length], 8)
        proposal = found(lookup, ids[:length])
        if true and came:
            assert proposal[: len(expected)] == expected[: len(proposal)]
        elif not true and step == 1:
            assert proposal == expected[: len(proposal)]


def test_after_searches_in_vain_there_are_fewer_but_a_repetition_is_seen_within_four_tokens():
    lookup, text = PromptLookup(HitRates()), list(range(300))
    for length in range(1, 300):
        assert not lookup.chances(text[:length])
    seen = [bool(lookup.chances(text + text[100 : 100 + count])) for count in range(1, 7)]
    assert seen[-1]
    searched = []
    lookup._search = lambda ids: searched.append(len(ids)) or PromptLookup._search(lookup, ids)  # type: ignore[method-assign]
    assert lookup.chances(text + text[100:107])
    assert not searched, "what comes true is not searched for"


def test_what_lies_before_the_window_is_not_searched(monkeypatch):
    monkeypatch.setattr(prompt_lookup, "_WINDOW", 50)
    early = [1, 2, 3, *range(10, 60), 1, 2]
    assert not PromptLookup(HitRates()).chances(early)
    assert PromptLookup(HitRates()).chances([*early[:3], *early[10:]])


def test_a_short_period_goes_on_like_it_began():
    assert found(PromptLookup(hit_rates(0.95)), [5, 1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]
    assert found(PromptLookup(hit_rates(0.95)), [9, 9, 9], 4) == [9, 9, 9, 9]


def test_chances_follow_what_came_true_whether_it_was_verified_or_not():
    rates, chance = HitRates(), random.Random(1)
    lookup, text = PromptLookup(rates), [chance.randrange(9) for _ in range(40)]
    for _ in range(300):
        lookup.chances(text)
        text.append(chance.randrange(9))
    noise = lookup.chances(text)
    assert not noise or noise[0] < 0.25
    page = list(range(100, 160))
    text += page
    for token in page * 6:
        lookup.chances(text)
        text.append(token)
    assert lookup.chances(text)[7] > 0.75
    assert PromptLookup(rates).chances(text)[7] > 0.5, "what one text learnt is where the next begins"


def test_chances_fall_with_the_depth_and_rise_with_what_agreed():
    lookup = PromptLookup(HitRates())
    chances = [lookup.chances([*range(50), *range(count)]) for count in (2, 4, 8, 16)]
    assert all(0 < len(row) <= MAX_DRAFT_TOKENS and row == sorted(row, reverse=True) for row in chances)
    firsts = [row[0] for row in chances]
    assert firsts == sorted(firsts)
    assert len(set(firsts)) == 4


def test_a_lookup_proposal_is_what_followed_the_last_time_and_goes_on_as_that_did():
    lookup = PromptLookup(hit_rates(0.95))
    assert lookup.propose(2) == EMPTY_TREE, "it has seen nothing yet"
    lookup.chances([1, 2, 3, 1, 2])
    assert lookup.propose(2) == TokenTree.chain([3, 1])
    assert lookup.propose(7) == TokenTree.chain([3, 1, 2, 3, 1, 2, 3])


def test_it_says_whether_a_proposal_is_of_the_text_itself():
    lookup = PromptLookup(hit_rates(0.95), prediction=[1, 2, 3, 4])
    in_text = []
    for text in ([7], [7, 8, 9, 1, 2], [7, 8, 9, 1, 2, 7, 8]):
        assert lookup.chances(text)
        in_text.append(lookup.in_text)
    assert in_text == [False, False, True]
    assert not PromptLookup(hit_rates(0.95)).in_text, "there is none"


def test_what_is_remembered_fades():
    acceptance = AcceptanceRate(100, prior=0.5, trials=4)
    for _ in range(400):
        acceptance.observe(4, 4)
    assert acceptance.share() > 0.97
    for _ in range(50):
        acceptance.observe(0, 4)
    assert acceptance.share() < 0.2
