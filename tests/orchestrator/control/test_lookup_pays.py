"""When proposals of prompt lookup are verified: never so that the target alone would have been faster, and where the
text repeats itself so that much is gained.

In simulated time, with the real loop, one text at a time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest

from orchestrator.control.controller import Fixed
from orchestrator.rounds import Grant, Source
from specdec.core.limits import MAX_DRAFT_TOKENS
from specdec.core.sequence import SequenceSpec
from testing.table_model import Table
from tests.orchestrator.control import far_draft
from tests.orchestrator.control.far_draft import Outcome, Place, Shared

LENGTH = 1500


@dataclass(frozen=True, slots=True)
class Text(Table):
    """The target's text is ``ids``."""

    ids: tuple[int, ...] = ()

    def next_token(self, spec: SequenceSpec, tail: Sequence[int], position: int) -> int:
        return self.ids[position] if position < len(self.ids) else 0


async def decoded(
    place: Place, prompt: list[int], text: list[int], shared: Shared, seed: int = 0, **looking_up: bool
) -> Outcome:
    """A request with the output ``text``."""
    table = Text(1 << 20, place.acceptance, ids=(*prompt, *text))
    options = dict(max_ahead=0, shared=shared, seed=seed, table=table, prompt=tuple(prompt))
    return await far_draft.decoded(place, len(text), **options, **{"looks_up": True} | looking_up)


def at_random(vocab: int) -> Iterator[int]:
    chance = random.Random(vocab)
    while True:
        yield chance.randrange(vocab)


def periodic(period: int) -> Iterator[int]:
    page = [token for token, _ in zip(at_random(5000), range(period), strict=False)]
    while True:
        yield from page


def edited(every: int) -> Iterator[int]:
    """A page again and again, each time with other tokens at every so many places."""
    page, fresh = list(range(300)), at_random(100_000)
    yield from page
    while True:
        yield from (next(fresh) if index % every == every - 1 else token for index, token in enumerate(page))


def copying(span: int, between: int) -> Iterator[int]:
    """Passages of what was said long ago, and as much of something else between them."""
    chance, fresh, said = random.Random(3), at_random(5000), list(range(600))
    yield from said
    while True:
        start = chance.randrange(len(said) - span)
        said += said[start : start + span] + [next(fresh) for _ in range(between)]
        yield from said[-span - between :]


def treacherous(length: int) -> Iterator[int]:
    """Passages of so many tokens that are repeated, and never followed by what followed them."""
    chance, fresh = random.Random(4), at_random(100_000)
    passages = [[next(fresh) for _ in range(length)] for _ in range(5)]
    while True:
        yield from chance.choice(passages)
        yield next(fresh)


def changing() -> Iterator[int]:
    """At first it repeats itself, then it only seems to, again and again."""
    page, noise = periodic(40), at_random(6)
    while True:
        yield from (next(page) for _ in range(200))
        yield from (next(noise) for _ in range(200))


TEXTS: dict[str, Callable[[], Iterator[int]]] = {
    "random": lambda: at_random(1000),
    "few words": lambda: at_random(8),
    "page": lambda: periodic(50),
    "copies": lambda: copying(40, 40),
    "edits": lambda: edited(10),
    "scraps": lambda: copying(6, 2),
    "treacherous 3": lambda: treacherous(3),
    "treacherous 20": lambda: treacherous(20),
    "changing": changing,
}
NONE = Place(pass_ms=20.0, row_ms=0.02, step_ms=2.0, dead_after=-1)
"""A target without a draft."""
DRAFT = replace(NONE, acceptance=0.7, dead_after=float("inf"))
PLACES = {
    "free rows": NONE,
    "dear rows": replace(NONE, row_ms=4.0),
    "very dear rows": replace(NONE, pass_ms=1.0, row_ms=15.0),
    "far target": replace(NONE, beyond_ms=20.0),
    "fast passes": replace(NONE, pass_ms=1.0, beyond_ms=1.5),
    "64 sequences": replace(NONE, sequences=64),
    "dead draft": replace(NONE, dead_after=0.0),
    "bad draft": replace(DRAFT, acceptance=0.1),
    "draft": DRAFT,
}


def text_of(kind: str, length: int = LENGTH) -> tuple[list[int], list[int]]:
    source = TEXTS[kind]()
    prompt = [next(source) for _ in range(200)]
    return prompt, [next(source) for _ in range(length)]


@pytest.mark.parametrize("target_looks_up", [False, True])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", TEXTS)
async def test_no_text_is_slower_than_with_the_target_alone(kind, place, target_looks_up):
    where, shared = PLACES[place], Shared(ahead=False, most=MAX_DRAFT_TOKENS if target_looks_up else 8)
    await decoded(where, *text_of("changing", 300), shared, target_looks_up=target_looks_up)
    outcome = await decoded(where, *text_of(kind), shared, seed=1, target_looks_up=target_looks_up)
    print(outcome, outcome.tokens_per_s / where.alone)
    assert outcome.tokens_per_s >= 0.95 * where.alone


@pytest.mark.parametrize(("kind", "least"), [("page", 5.0), ("copies", 1.2), ("changing", 1.5), ("edits", 1.8)])
@pytest.mark.parametrize("place", ["free rows", "dead draft", "bad draft", "64 sequences"])
@pytest.mark.parametrize("target_looks_up", [False, True])
async def test_a_text_that_repeats_itself_is_faster(kind, least, place, target_looks_up):
    where, shared = PLACES[place], Shared(ahead=False, most=MAX_DRAFT_TOKENS if target_looks_up else 8)
    await decoded(where, *text_of("changing", 300), shared, target_looks_up=target_looks_up)
    outcome = await decoded(where, *text_of(kind), shared, seed=1, target_looks_up=target_looks_up)
    print(outcome, outcome.tokens_per_s / where.alone)
    assert outcome.tokens_per_s >= least * where.alone


@pytest.mark.parametrize(("kind", "gain"), [("page", 1.3), ("edits", 1.8), ("scraps", 1.3)])
async def test_a_target_that_looks_up_itself_gains_by_the_trips_it_does_not_wait_for(kind, gain):
    where, rates = PLACES["far target"], []
    for target_looks_up in (False, True):
        shared = Shared(ahead=False, most=MAX_DRAFT_TOKENS)
        await decoded(where, *text_of("changing", 300), shared, target_looks_up=target_looks_up)
        outcome = await decoded(where, *text_of(kind), shared, seed=1, target_looks_up=target_looks_up)
        rates.append(outcome.tokens_per_s)
    assert rates[1] >= gain * rates[0]


@pytest.mark.parametrize("kind", ["page", "copies", "edits"])
async def test_beside_a_good_draft_it_is_faster_still_and_no_text_is_slower_than_with_the_draft_alone(kind):
    where = PLACES["draft"]
    rates = {}
    for looks_up in (True, False):
        shared = Shared(ahead=False)
        await decoded(where, *text_of("random", 300), shared, looks_up=looks_up)
        rates[looks_up] = (await decoded(where, *text_of(kind), shared, seed=1, looks_up=looks_up)).tokens_per_s
    print(rates)
    assert rates[True] >= {"page": 2.0, "copies": 1.1, "edits": 1.0}[kind] * rates[False]


async def test_where_guesses_win_all_the_time_the_draft_is_hardly_asked():
    where, shared = PLACES["draft"], Shared(ahead=False)
    await decoded(where, *text_of("random", 300), shared)
    assert shared.policy.costs.known
    outcome = await decoded(where, *text_of("page"), shared, seed=1)
    assert outcome.statistics.num_drafts - outcome.statistics.num_drafts_on_time <= 20
    assert outcome.statistics.num_lookup_tokens > 1000


async def test_a_text_that_does_not_repeat_itself_is_left_alone():
    outcome = await decoded(PLACES["free rows"], *text_of("random"), Shared(ahead=False))
    assert outcome.statistics.num_lookup_tokens <= 0.02 * LENGTH


async def test_what_a_draft_gets_accepted_and_what_a_lookup_does_are_not_mixed():
    where, shared = PLACES["draft"], Shared(ahead=False)
    await decoded(where, *text_of("random", 600), shared)
    before = shared.acceptance.of_ranks[0]
    outcome = await decoded(where, *text_of("page"), shared)
    assert outcome.statistics.num_accepted_lookup_tokens / outcome.statistics.num_lookup_tokens > 0.9
    assert shared.acceptance.of_ranks[0] == pytest.approx(before, abs=0.05)
    assert shared.hit_rates.after(16) > 0.95


def test_a_client_that_names_a_number_gets_that_number_and_no_guess():
    sequence = SimpleNamespace(ids=[1, 2, 3] * 9, num_committed=9, remaining=1 << 20)
    assert Fixed(4).plan(sequence).grants == (Grant(Source.DRAFT, 4, waits=True),)
