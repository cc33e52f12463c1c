"""When what a lookup guesses is verified: never so that the target alone would have been faster, and where the text
repeats itself so that much is gained.

In simulated time, one text at a time; with many sequences all do what this one does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from orchestrator.control.concert import Concert
from orchestrator.control.controller import Adaptive, Fixed
from orchestrator.control.costs import Costs
from orchestrator.control.guesses import Guesses
from orchestrator.control.prompt_lookup import PromptLookup
from orchestrator.rounds import Proposal, Rival, RoundPlan
from specdec.core.rounds import Budget, Timings, Verdict
from specdec.core.tree import EMPTY_TREE, TokenTree
from tests.models.fake_peers import hit_rates, still_to_come

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


@dataclass(slots=True)
class Outcome:
    seconds: float = 0.0
    num_tokens: int = 0
    num_guessed: int = 0
    num_right: int = 0
    num_waits: int = 0

    @property
    def tokens_per_s(self) -> float:
        return self.num_tokens / self.seconds


def decoded(
    place: Place, prompt: list[int], text: list[int], costs: Costs, seed: int = 0, guesses: bool = True
) -> Outcome:
    """A request whose output is ``text``."""
    chance, outcome = random.Random(seed), Outcome()
    lookup = PromptLookup(costs.hit_rates)
    controller = Adaptive(Concert(costs), lookup if guesses else None)
    sequence = SimpleNamespace(ids=[*prompt, text[0]], num_committed=1, remaining=len(text) - 1)
    unasked, number = 0, 0
    while sequence.remaining:
        plan = controller.plan(sequence)
        budget, guess = plan.budget, plan.guess
        rest, number = text[sequence.num_committed :], number + 1
        tree = guess.tree if guess.beats >= Rival.WAIT else EMPTY_TREE
        guessed = Rival.WAIT if tree else None
        if not tree and budget.max_nodes and place.dead:
            waited_s = min(1.0, costs.patience_s(budget.max_nodes))
            outcome.seconds += waited_s
            costs.late(budget.max_nodes, waited_s)
        elif not tree and budget.max_nodes and place.acceptance is not None:
            outcome.num_waits += 1
            drafted_s = place.step_ms * budget.max_nodes / 1e3 * chance.lognormvariate(0, 0.05)
            outcome.seconds += drafted_s
            costs.drafted(budget.max_nodes, drafted_s)
            tree = TokenTree.chain([t if chance.random() < place.acceptance else -1 for t in rest[: budget.max_nodes]])
        if not tree and guess.tree:
            tree, guessed = guess.tree, Rival.NOTHING
        if guessed is not None:
            outcome.num_guessed += len(tree)
        assert len(tree) < sequence.remaining or not tree, "the last token of all comes from the target"
        assert not (tree and (unasked or plan.run_on)), "nothing is verified among tokens that come unasked"
        right = next((i for i, token in enumerate(tree.token_ids) if token != rest[i]), len(tree))
        outcome.num_right += right if guessed is not None else 0
        rows = place.sequences * (len(tree) + 1)
        pass_s = place.pass_s(rows) * chance.lognormvariate(0, 0.05) * (5 if chance.random() < 0.005 else 1)
        timings = Timings(0, int(pass_s * 1e6), 0, rows, place.sequences)
        if unasked:
            outcome.seconds += pass_s
            costs.went_on(timings, place.sequences)
            unasked = still_to_come(unasked, plan.run_on)
        else:
            outcome.seconds += pass_s + place.beyond_ms / 1e3
            costs.verified(len(tree), pass_s + place.beyond_ms / 1e3, timings, 1, place.sequences)
            unasked = plan.run_on
        committed = rest[: right + 1]
        sequence.ids += committed
        sequence.num_committed += len(committed)
        sequence.remaining -= len(committed)
        outcome.num_tokens += len(committed)
        verdict = Verdict(number, 0, tuple(range(right)), committed[-1], (), timings, run_on=unasked)
        controller.observe(Proposal(tree, guessed), verdict)
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
    where, costs = PLACES[place], Costs(8)
    decoded(where, *text_of("changing", 300), costs)
    outcome = decoded(where, *text_of(kind), costs, seed=1)
    print(outcome, outcome.tokens_per_s / alone(where))
    assert outcome.tokens_per_s >= 0.95 * alone(where)


@pytest.mark.parametrize(("kind", "least"), [("page", 5.0), ("copies", 1.2), ("changing", 1.5), ("edits", 1.8)])
@pytest.mark.parametrize("place", ["free rows", "dead draft", "bad draft", "64 sequences"])
def test_a_text_that_repeats_itself_is_faster(kind, least, place):
    where, costs = PLACES[place], Costs(8)
    decoded(where, *text_of("changing", 300), costs)
    outcome = decoded(where, *text_of(kind), costs, seed=1)
    print(outcome, outcome.tokens_per_s / alone(where))
    assert outcome.tokens_per_s >= least * alone(where)


@pytest.mark.parametrize("kind", ["page", "copies", "edits"])
def test_beside_a_good_draft_it_is_faster_still_and_no_text_is_slower_than_with_the_draft_alone(kind):
    where = PLACES["draft"]
    rates = {}
    for guesses in (True, False):
        costs = Costs(8)
        decoded(where, *text_of("random", 300), costs, guesses=guesses)
        rates[guesses] = decoded(where, *text_of(kind), costs, seed=1, guesses=guesses).tokens_per_s
    print(rates)
    assert rates[True] >= {"page": 2.0, "copies": 1.1, "edits": 1.0}[kind] * rates[False]


def test_where_guesses_win_all_the_time_the_draft_is_hardly_asked():
    where, costs = PLACES["draft"], Costs(8)
    decoded(where, *text_of("random", 300), costs)
    assert costs.known
    outcome = decoded(where, *text_of("page"), costs, seed=1)
    assert outcome.num_waits <= 20
    assert outcome.num_guessed > 1000


def test_a_text_that_does_not_repeat_itself_is_left_alone():
    outcome = decoded(PLACES["free rows"], *text_of("random"), Costs(8))
    assert outcome.num_guessed <= 0.02 * LENGTH


def test_what_a_draft_gets_accepted_and_what_a_lookup_does_are_not_mixed():
    where, costs = PLACES["draft"], Costs(8)
    decoded(where, *text_of("random", 600), costs)
    before = costs.chances.of_ranks[0]
    outcome = decoded(where, *text_of("page"), costs)
    assert outcome.num_right / outcome.num_guessed > 0.9
    assert costs.chances.of_ranks[0] == pytest.approx(before, abs=0.05)
    assert costs.hit_rates.after(16) > 0.95


def test_guesses_that_fail_cost_the_draft_none_of_its_savings():
    where, costs = Place(), Costs(8)
    decoded(where, *text_of("changing", 300), costs)
    costs.lookup_savings.book(0.5 - costs.lookup_savings.rounds)
    before = costs.savings.rounds
    guesses = Guesses(costs, PromptLookup(costs.hit_rates))
    for _ in range(20):
        guesses.observe(Proposal(TokenTree.chain(range(16)), Rival.WAIT), Verdict(1, 0, (), 5))
    assert not costs.lookup_savings.left
    assert costs.savings.rounds == before


def test_without_savings_nothing_is_guessed():
    where, costs = Place(), Costs(8)
    decoded(where, *text_of("changing", 300), costs)
    costs.lookup_savings.book(-99.0)
    outcome = decoded(where, *text_of("page", 100), costs, seed=1)
    assert outcome.num_guessed == 0


def test_without_any_draft_the_target_goes_on_unasked():
    costs = Costs(8)
    controller, unasked, asked = Adaptive(Concert(costs)), 0, 0
    sequence = SimpleNamespace(remaining=1 << 30)
    for number in range(1, 400):
        plan = controller.plan(sequence)
        timings = Timings(0, 20_000, 0, 1, 1)
        if unasked:
            unasked = still_to_come(unasked, plan.run_on)
            costs.went_on(timings, 1)
        else:
            asked, unasked = asked + 1, plan.run_on
            costs.verified(0, 0.0205, timings, 1, 1)
        controller.observe(Proposal(), Verdict(number, 0, (), 0, (), timings, run_on=unasked))
    assert asked < 100


@pytest.mark.parametrize(
    ("share", "draft_s", "beaten"),
    [
        (0.95, 0.016, Rival.TREE),  # more often right than the draft, wherever that is
        (0.5, 0.5, Rival.WAIT),  # less often, but nothing that has to be waited for so long
        (0.4, 0.001, Rival.NOTHING),  # less often, and the draft is quick
    ],
)
def test_on_a_miss_and_on_a_hit_the_better_one_is_verified(share, draft_s, beaten):
    costs = Costs(8, ahead=True)
    for number in range(400):
        depth = (0, 4, 1, 8)[number % 4]
        if depth:
            costs.drafted(depth, draft_s * depth / 4)
            costs.foreseen(number % 8 != 1)
            right = 4 * depth // 5
            costs.chances.observe(TokenTree.chain([1] * depth), range(right), ended=right < depth)
        timings = Timings(0, 20_000 + number % 2 + 10 * depth, 0, depth + 1, 1)
        costs.verified(depth, 0.0205, timings, 1, 1)
    lookup = PromptLookup(hit_rates(share))
    controller = Adaptive(Concert(costs), lookup, ahead=True)
    sequence = SimpleNamespace(ids=[*range(20), *range(10)], num_committed=10, remaining=1 << 20)
    _, plan = (controller.plan(sequence) for _ in range(2))
    assert plan.budget.max_depth > 0, "the draft is worth its while"
    assert plan.guess.tree
    assert plan.guess.beats is beaten


def test_the_plan_tells_what_rounds_take_up_to_the_last_token_but_one():
    costs = Costs(8, ahead=True)
    for number in range(40):
        depth = number % 5
        if depth:
            costs.drafted(depth, 0.002)
            costs.foreseen(True)
        costs.verified(depth, 0.0205, Timings(0, 20_000 + number % 2 + 10 * depth, 0, depth + 1, 1), 1, 1)
    sequence = SimpleNamespace(ids=[1, 2, 3], num_committed=1, remaining=1 << 20)
    grows, waits = (Adaptive(Concert(costs), ahead=ahead) for ahead in (True, False))
    assert grows.plan(sequence).rounds == tuple(costs.unwaited[:9])
    assert waits.plan(sequence).rounds == ()
    sequence.remaining = 3
    assert len(grows.plan(sequence).rounds) == 3
    assert Adaptive(Concert(Costs(8, ahead=True)), ahead=True).plan(sequence).rounds == (), "nothing is known yet"


def test_a_client_that_names_a_number_gets_that_number_and_no_guess():
    sequence = SimpleNamespace(ids=[1, 2, 3] * 9, num_committed=9, remaining=1 << 20)
    assert Fixed(4).plan(sequence) == RoundPlan(Budget(4, 4), early=True)
