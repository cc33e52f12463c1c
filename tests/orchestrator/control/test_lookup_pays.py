"""When proposals of prompt lookup are verified: never so that the target alone would have been faster, and where the
text repeats itself so that much is gained.

In simulated time, one text at a time; with many sequences all do what this one does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from orchestrator.control.controller import Adaptive, Fixed
from orchestrator.control.cost_model import CostModel
from orchestrator.control.draft_length import DraftLength
from orchestrator.drafting.draft_client import LATE
from orchestrator.drafting.prompt_lookup import HitRates, PromptLookup
from orchestrator.rounds import Drafting, Exchange, Grant, Proposal, RoundRecord, Source
from specdec.core.rounds import Timings, Verdict
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.speculation.acceptance import AcceptanceModel
from tests.models.fake_peers import still_to_come

LENGTH = 1500


@dataclass(frozen=True, slots=True)
class Place:
    """Milliseconds; ``acceptance`` is None where there is no draft, ``dead`` one that never answers."""

    pass_ms: float = 20.0
    row_ms: float = 0.02
    beyond_ms: float = 0.5
    sequences: int = 1
    acceptance: float | None = None
    step_ms: float = 2.0
    dead: bool = False

    def pass_s(self, rows: int) -> float:
        return (self.pass_ms + self.row_ms * rows) / 1e3


class Shared:
    """What the requests of one orchestrator share."""

    def __init__(self) -> None:
        self.policy = DraftLength(CostModel(), 8)
        self.acceptance, self.hit_rates = AcceptanceModel(), HitRates()


@dataclass(slots=True)
class Outcome:
    seconds: float = 0.0
    num_tokens: int = 0
    num_looked_up: int = 0
    num_right: int = 0
    num_waits: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def decoded(
    place: Place, prompt: list[int], text: list[int], shared: Shared, seed: int = 0, looks_up: bool = True
) -> Outcome:
    """A request whose output is ``text``."""
    chance, outcome = random.Random(seed), Outcome()
    lookup = PromptLookup(shared.hit_rates)
    controller = Adaptive(shared.policy, AcceptanceModel(shared.acceptance), lookup if looks_up else None)
    sequence = SimpleNamespace(ids=[*prompt, text[0]], num_committed=1, remaining=len(text) - 1)
    autonomous, number = 0, 0
    while sequence.remaining:
        plan = controller.plan(sequence)
        rest, number = text[sequence.num_committed :], number + 1
        tree, source, drafting = EMPTY_TREE, None, Drafting()
        for grant in plan.grants:
            if grant.source is Source.LOOKUP:
                tree, source = lookup.propose(grant.num_tokens), Source.LOOKUP
                outcome.num_looked_up += len(tree)
            elif place.acceptance is not None:
                outcome.num_waits += 1
                waited_s = plan.deadline_s
                if not place.dead:
                    waited_s = place.step_ms * grant.num_tokens / 1e3 * chance.lognormvariate(0, 0.05)
                    right = [t if chance.random() < place.acceptance else -1 for t in rest[: grant.num_tokens]]
                    tree, source = TokenTree.chain(right), Source.DRAFT
                outcome.seconds += waited_s
                answer = grant.num_tokens, waited_s * (LATE if place.dead else 1.0)
                drafting = Drafting(grant.num_tokens, waited_s, answer)
            if tree:
                break
        assert len(tree) < sequence.remaining or not tree, "the last token of all comes from the target"
        assert not (tree and (autonomous or plan.num_autonomous)), "nothing is verified among autonomous tokens"
        right = next((i for i, token in enumerate(tree.token_ids) if token != rest[i]), len(tree))
        outcome.num_right += right if source is Source.LOOKUP else 0
        rows = place.sequences * (len(tree) + 1)
        pass_s = place.pass_s(rows) * chance.lognormvariate(0, 0.05) * (5 if chance.random() < 0.005 else 1)
        timings = Timings(0, int(pass_s * 1e6), 0, rows, place.sequences)
        round_trip_s = None if autonomous else pass_s + place.beyond_ms / 1e3
        outcome.seconds += round_trip_s or pass_s
        autonomous = still_to_come(autonomous, plan.num_autonomous) if autonomous else plan.num_autonomous
        committed = rest[: right + 1]
        sequence.ids += committed
        sequence.num_committed += len(committed)
        sequence.remaining -= len(committed)
        outcome.num_tokens += len(committed)
        verdict = Verdict(number, 0, tuple(range(right)), committed[-1], timings, num_autonomous_left=autonomous)
        exchange = Exchange(round_trip_s, num_live=place.sequences)
        controller.observe(RoundRecord.of(Proposal(tree, source if tree else None, drafting), verdict, exchange))
    return outcome


def alone(place: Place) -> float:
    """Tokens per second of the target alone, unasked."""
    accidents = 1 + 0.005 * 4
    return 1 / (place.pass_s(place.sequences) * accidents)


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
PLACES = {
    "free rows": Place(),
    "dear rows": Place(row_ms=4.0),
    "very dear rows": Place(pass_ms=1.0, row_ms=15.0),
    "far target": Place(beyond_ms=20.0),
    "fast passes": Place(pass_ms=1.0, beyond_ms=1.5),
    "64 sequences": Place(sequences=64, row_ms=0.02),
    "dead draft": Place(dead=True, acceptance=0.0),
    "bad draft": Place(acceptance=0.1),
    "draft": Place(acceptance=0.7),
}


def text_of(kind: str, length: int = LENGTH) -> tuple[list[int], list[int]]:
    source = TEXTS[kind]()
    prompt = [next(source) for _ in range(200)]
    return prompt, [next(source) for _ in range(length)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("kind", TEXTS)
def test_no_text_is_slower_than_with_the_target_alone(kind, place):
    where, shared = PLACES[place], Shared()
    decoded(where, *text_of("changing", 300), shared)
    outcome = decoded(where, *text_of(kind), shared, seed=1)
    print(outcome, outcome.tokens_per_s / alone(where))
    assert outcome.tokens_per_s >= 0.95 * alone(where)


@pytest.mark.parametrize(("kind", "least"), [("page", 5.0), ("copies", 1.2), ("changing", 1.5), ("edits", 1.8)])
@pytest.mark.parametrize("place", ["free rows", "dead draft", "bad draft", "64 sequences"])
def test_a_text_that_repeats_itself_is_faster(kind, least, place):
    where, shared = PLACES[place], Shared()
    decoded(where, *text_of("changing", 300), shared)
    outcome = decoded(where, *text_of(kind), shared, seed=1)
    print(outcome, outcome.tokens_per_s / alone(where))
    assert outcome.tokens_per_s >= least * alone(where)


@pytest.mark.parametrize("kind", ["page", "copies", "edits"])
def test_beside_a_good_draft_it_is_faster_still_and_no_text_is_slower_than_with_the_draft_alone(kind):
    where = PLACES["draft"]
    rates = {}
    for looks_up in (True, False):
        shared = Shared()
        decoded(where, *text_of("random", 300), shared, looks_up=looks_up)
        rates[looks_up] = decoded(where, *text_of(kind), shared, seed=1, looks_up=looks_up).tokens_per_s
    print(rates)
    assert rates[True] >= {"page": 2.0, "copies": 1.1, "edits": 1.0}[kind] * rates[False]


def test_where_guesses_win_all_the_time_the_draft_is_hardly_asked():
    where, shared = PLACES["draft"], Shared()
    decoded(where, *text_of("random", 300), shared)
    assert shared.policy.costs.known
    outcome = decoded(where, *text_of("page"), shared, seed=1)
    assert outcome.num_waits <= 20
    assert outcome.num_looked_up > 1000


def test_a_text_that_does_not_repeat_itself_is_left_alone():
    outcome = decoded(PLACES["free rows"], *text_of("random"), Shared())
    assert outcome.num_looked_up <= 0.02 * LENGTH


def test_what_a_draft_gets_accepted_and_what_a_lookup_does_are_not_mixed():
    where, shared = PLACES["draft"], Shared()
    decoded(where, *text_of("random", 600), shared)
    before = shared.acceptance.of_ranks[0]
    outcome = decoded(where, *text_of("page"), shared)
    assert outcome.num_right / outcome.num_looked_up > 0.9
    assert shared.acceptance.of_ranks[0] == pytest.approx(before, abs=0.05)
    assert shared.hit_rates.after(16) > 0.95


def test_a_client_that_names_a_number_gets_that_number_and_no_guess():
    sequence = SimpleNamespace(ids=[1, 2, 3] * 9, num_committed=9, remaining=1 << 20)
    assert Fixed(4).plan(sequence).grants == (Grant(Source.DRAFT, 4, waits=True),)
