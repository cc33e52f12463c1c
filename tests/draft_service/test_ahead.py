"""Growing below what is in flight: where, how far, and that every node is what the draft would have said anyway."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from draft_service.ahead import Spot, spots
from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.engine import DraftEngine, DraftOpen, DraftSequence
from specdec.batching import Key
from specdec.errors import Draining, InvalidArgument
from specdec.model_runner import RowOutputs
from specdec.packed_rows import Segment
from specdec.rounds import Advance, Budget, Growth, GrowthEnd
from specdec.sequence import Method, SamplingParams, SequenceSpec
from specdec.tree import EMPTY_TREE, ROOT, TokenTree
from tests.table_model import TableRunner

A, B = Key(1, 1), Key(1, 2)
SAMPLINGS = [
    SamplingParams(0.0),
    SamplingParams(0.8),
    SamplingParams(1.0, top_k=3),
    SamplingParams(0.7, presence_penalty=1.5, repetition_penalty=1.3),
]


def runner(num_slots: int = 4096) -> TableRunner:
    return TableRunner(seed=3, num_slots=num_slots)


def opened(sampling: SamplingParams, ids: tuple[int, ...] = (1, 2, 3), **options: int) -> DraftEngine:
    engine = DraftEngine(LanguageModelDrafter(runner(**options)))
    engine.open(A, DraftOpen(SequenceSpec(ids, len(ids), sampling, 7), Budget()))
    rest(engine)
    return engine


def rest(engine: DraftEngine, limit: int = 100) -> list[Growth]:
    """What is answered until nothing is left to do."""
    growths = []
    while not engine.idle:
        growths += [growth for _, growth in engine.step()]
        limit -= 1
        assert limit, "the engine never comes to rest"
    return growths


def said(sampling: SamplingParams, ids: list[int]) -> int:
    """What the draft proposes after a text, asked for nothing else."""
    drafter = LanguageModelDrafter(runner())
    spec = SequenceSpec(tuple(ids), 3, sampling, 7)
    [[node]] = drafter.grow([DraftSequence(spec, list(ids), memory=drafter.open(spec))])  # type: ignore[misc]
    return node.token_id


def paths(tree: TokenTree) -> list[list[int]]:
    """The tokens from the root to each node."""
    found: list[list[int]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append([*(found[parent] if parent != ROOT else []), token])
    return found


def _children(tree: TokenTree, node: int) -> list[int]:
    return [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == node]


def check_said(sampling: SamplingParams, ids: list[int], tree: TokenTree) -> None:
    """The first child of every node is what the draft says there; others are runners-up."""
    seen: set[int] = set()
    for path, parent in zip(paths(tree), tree.parents, strict=True):
        if parent not in seen:
            seen.add(parent)
            assert path[-1] == said(sampling, [*ids, *path[:-1]])


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_what_was_asked_for_comes_first_and_then_what_hangs_below_it(sampling):
    engine = opened(sampling)
    engine.submit(A, Advance(1, 3, budget=Budget(3, 9, 12)))
    first, *ahead, end = rest(engine)
    chain = first.tree
    assert (first.end, first.advance, len(chain), chain.is_chain) == (None, 1, 3, True)
    assert end.end is GrowthEnd.BUDGET
    sizes = [len(growth.tree) for growth in ahead]
    assert sizes == sorted(sizes)
    whole = end.tree
    assert len(whole) == 3 + 12
    assert whole.prefix(3) == chain
    assert whole.problem(64) is None
    assert all(whole.parents.count(node) > 1 for node in (ROOT, 0, 1)), "corrections"
    assert max(whole.depths) > 3, "what follows if all of it is right"
    check_said(sampling, [1, 2, 3], whole)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_after_a_verdict_it_goes_on_from_the_branch_that_came_true(sampling):
    """Again and again, with the orchestrator's part played by chance."""
    engine, random_ = opened(sampling), random.Random(5)
    ids, tree, number = [1, 2, 3], EMPTY_TREE, 0
    hits = 0
    for _ in range(100):
        number += 1
        new = ids[engine._works[A].sequence.base :]
        flying = tree.prefix(3)
        budget = Budget(0 if flying else 3, 9, 10)
        engine.submit(A, Advance(number, len(ids), tuple(new), flying, budget))
        for _ in range(random_.randrange(1, 9)):
            if engine.idle:
                break
            for _, growth in engine.step():
                if growth.base == len(ids):
                    tree = tree.merge(growth.tree)
        assert tree.problem(64) is None
        check_said(sampling, ids, tree)
        flying = flying or tree.prefix(3)
        # A verdict: some path of what flies, and one token more, which may have been foreseen.
        committed, node = [], ROOT
        while (known := _children(flying, node)) and random_.random() < 0.7:
            committed.append(random_.choice(known))
            node = flying.child(node, committed[-1])
        expected = set(known)
        foreseen = [token for token in _children(tree, tree.walk(committed)) if token not in expected]
        guess = random_.choice(foreseen) if foreseen and random_.random() < 0.7 else random_.randrange(8)
        if guess in expected:
            continue
        committed.append(guess)
        tree = tree.descend(committed)
        hits += bool(tree)
        ids += committed
    assert hits > 5


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_where_nothing_was_asked_for_it_grows_below_the_last_token(sampling):
    engine = opened(sampling)
    engine.submit(A, Advance(1, 5, (4, 6), budget=Budget(0, 9, 12)))
    growths = rest(engine)
    assert len(growths[-1].tree) == 12
    assert growths[-1].end is GrowthEnd.BUDGET
    check_said(sampling, [1, 2, 3, 4, 6], growths[-1].tree)


def test_a_draft_that_is_right_grows_deep_and_one_that_is_not_grows_wide():
    trees = {}
    for right in (True, False):
        engine, ids = opened(SamplingParams(0.0)), [1, 2, 3]
        for number in range(1, 60):
            engine.submit(
                A, Advance(number, len(ids), tuple(ids[engine._works[A].sequence.base :]), budget=Budget(2, 9, 9))
            )
            tree = rest(engine)[-1].tree
            ids.append(tree.token_ids[0] if right else (tree.token_ids[0] + 1) % 8)
        trees[right] = tree
    assert max(trees[True].depths) > max(trees[False].depths)
    assert trees[False].parents.count(ROOT) > trees[True].parents.count(ROOT)


def test_several_sequences_grow_ahead_in_one_pass_and_only_when_nobody_waits_for_a_token():
    engine = opened(SamplingParams(0.0))
    engine.open(B, DraftOpen(SequenceSpec((4, 5), 2, SamplingParams(0.0)), Budget()))
    rest(engine)
    for key, base in ((A, 3), (B, 2)):
        engine.submit(key, Advance(1, base, budget=Budget(2, 9, 6)))
    passes = engine.load.passes
    rest(engine)
    # Two for what was asked for, and the longer of both in what is grown ahead of it.
    assert engine.load.passes - passes < 2 + 6
    engine.submit(A, Advance(2, 4, (6,), TokenTree.chain([1, 2]), Budget(0, 9, 6)))
    engine.submit(B, Advance(2, 3, (6,), budget=Budget(2, 9, 6)))
    while not engine._works[B].ahead:
        assert engine._works[A].num_ahead == 0
        engine.step()
    rest(engine)
    assert engine._works[A].num_ahead == engine._works[B].num_ahead == 6


def test_it_never_grows_deeper_than_it_may_nor_beyond_the_context():
    engine = opened(SamplingParams(0.0))
    engine.submit(A, Advance(1, 3, budget=Budget(2, 4, 50)))
    tree = rest(engine)[-1].tree
    assert max(tree.depths) == 3
    limit = engine._drafter.info.context_length
    ids = tuple(i % 8 for i in range(limit - 4))
    short = opened(SamplingParams(0.0), ids)
    short.submit(A, Advance(1, limit - 4, budget=Budget(2, 50, 50)))
    tree = rest(short)[-1].tree
    assert limit - 4 + max(tree.depths) <= limit


@pytest.mark.parametrize("num_nodes", range(5))
@pytest.mark.parametrize("distance", range(-1, 5))
def test_no_row_is_fed_beyond_the_context(distance: int, num_nodes: int) -> None:
    """A model with learned positions has none there."""

    class Recording(TableRunner):
        last = -1

        def forward(self, segments: Sequence[Segment]) -> list[RowOutputs]:
            self.last = max(self.last, *(max(segment.positions) for segment in segments))
            return super().forward(segments)

    table = Recording(seed=3, context_length=40)
    engine = DraftEngine(LanguageModelDrafter(table))
    ids = tuple(i % 8 for i in range(40 - distance))
    engine.open(A, DraftOpen(SequenceSpec(ids, len(ids), SamplingParams(0.0)), Budget()))
    rest(engine)
    engine.submit(A, Advance(1, len(ids), budget=Budget(num_nodes, 50, 50)))
    grown = rest(engine)[-1]
    assert grown.end in (GrowthEnd.BUDGET, GrowthEnd.CONTEXT)
    # What was asked for stays in the tree, and the next advance may grow below it.
    engine.submit(A, Advance(2, len(ids), budget=Budget(0, 50, 50)))
    below = rest(engine)[-1]
    assert table.last <= 39
    if distance > num_nodes:
        assert len(ids) + max(below.tree.depths) == 39, "as deep as a row could still be fed"


def test_without_memory_for_branches_what_was_asked_for_still_comes():
    engine = opened(SamplingParams(0.0), tuple(range(8)) * 3, num_slots=32)
    engine.submit(A, Advance(1, 24, budget=Budget(3, 12, 60)))
    growths = rest(engine)
    assert len(growths[0].tree) == 3
    assert growths[-1].end is GrowthEnd.UNLIKELY
    engine.submit(A, Advance(2, 25, (5,), budget=Budget(3, 3)))
    assert [len(growth.tree) for growth in rest(engine)] == [3]


def test_who_asks_for_more_than_there_can_be_gets_as_much_as_there_can_be() -> None:
    """And soon: the numbers of the contract go up to 2**32 - 1, and none of them is work in itself."""
    most = 2**32 - 1
    engine = DraftEngine(LanguageModelDrafter(runner()))
    engine.open(A, DraftOpen(SequenceSpec((1, 2, 3), 3, SamplingParams(0.0)), Budget(2, most, most, 8)))
    assert len(rest(engine)[-1].tree) == 2 + 256, "their siblings are among what grew ahead"
    engine.submit(A, Advance(1, 4, (6,), budget=Budget(0, most, most)))
    grown = rest(engine)[-1]
    assert grown.end is GrowthEnd.BUDGET
    assert 256 <= len(grown.tree) <= 2 + 2 * 256
    engine.submit(A, Advance(2, 4, budget=Budget(most, most, most, 8)))
    assert rest(engine, 600)[-1].end is GrowthEnd.CONTEXT


def test_nothing_grows_ahead_of_a_chain_that_is_itself_too_long_to_be_fed_in_every_pass() -> None:
    engine = DraftEngine(LanguageModelDrafter(TableRunner(seed=3, context_length=1024)))
    for key, num_nodes in ((A, 512), (B, 513)):
        engine.open(key, DraftOpen(SequenceSpec((1, 2), 2, SamplingParams(0.0)), Budget(num_nodes, 600, 1)))
    rest(engine, 600)
    assert [len(engine._works[key].sequence.tree) for key in (A, B)] == [513, 513]


def test_a_newer_advance_ends_it_between_two_passes():
    engine = opened(SamplingParams(0.0))
    engine.submit(A, Advance(1, 3, budget=Budget(2, 9, 30)))
    for _ in range(4):
        engine.step()
    engine.submit(A, Advance(2, 4, (6,), budget=Budget(2, 2)))
    ends = [(growth.advance, growth.end) for growth in rest(engine)]
    assert ends == [(1, GrowthEnd.SUPERSEDED), (2, GrowthEnd.BUDGET)]


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
def test_a_chain_that_is_verified_against_its_distribution_is_never_grown_ahead(method):
    engine = DraftEngine(LanguageModelDrafter(runner()))
    engine.open(A, DraftOpen(SequenceSpec((1, 2), 2, SamplingParams(1.0), 7, method), Budget()))
    with pytest.raises(InvalidArgument) as caught:
        engine.submit(A, Advance(1, 2, budget=Budget(2, 9, 1)))
    assert caught.value.violations[0][0] == "budget.max_ahead"


def test_spots_name_what_is_to_be_grown():
    tree = TokenTree.chain([1, 2])
    good, poor = (0.8, 0.1, 0.05), (0.4, 0.2, 0.1)
    assert spots(tree, good, 0.07, 9, 9) == (Spot(1, 1), Spot(ROOT, 2), Spot(0, 2))
    assert spots(tree, good, 0.09, 9, 9) == (Spot(1, 1), Spot(ROOT, 2)), "the others may wait"
    assert spots(tree, good, 0.9, 9, 9) == (Spot(1, 1),), "there is always one"
    assert spots(tree, poor, 0.07, 9, 9) == (Spot(ROOT, 3), Spot(0, 2)), "wide before deep"
    assert spots(tree, good, 0.0, 2, 9) == (Spot(1, 1), Spot(ROOT, 2)), "the likeliest"
    assert spots(tree, good, 0.07, 9, 2) == (Spot(ROOT, 2), Spot(0, 2)), "none so deep"
    assert spots(tree, good, 0.0, 0, 9) == ()


def test_a_branching_tree_in_flight_beside_new_nodes_harms_nobody() -> None:
    engine = opened(SamplingParams(0.0))
    first = said(SamplingParams(0.0), [1, 2, 3])
    second = said(SamplingParams(0.0), [1, 2, 3, first])
    branching = TokenTree((first, (first + 1) % 8, second), (ROOT, ROOT, 0))
    engine.submit(A, Advance(1, 3, (), branching, Budget(5, 20, max_ahead=8)))
    grown = rest(engine)[-1]
    assert grown.end is GrowthEnd.BUDGET
    check_said(SamplingParams(0.0), [1, 2, 3], grown.tree)


def test_a_tree_does_not_grow_for_ever_where_nothing_is_committed() -> None:
    engine = opened(SamplingParams(0.0))
    for number in range(1, 12):
        token_ids = tuple(range(8)) * 8
        chain = TokenTree((number % 8, *token_ids), tuple(range(-1, len(token_ids))))
        engine.submit(A, Advance(number, 3, (), chain, Budget(0, 300, max_ahead=60)))
        rest(engine)
    assert len(engine._works[A].sequence.tree) <= 3 * 256


def test_an_answer_without_a_pass_says_nothing_of_the_passes_before() -> None:
    engine = opened(SamplingParams(0.0))
    engine.submit(A, Advance(1, 4, (5,), EMPTY_TREE, Budget(2, 2)))
    engine.step()
    assert engine.working_on()
    engine.submit(A, Advance(2, 4, (), EMPTY_TREE, Budget()))
    assert engine.step()
    assert not engine.working_on()


def test_nothing_grows_ahead_for_a_stream_that_is_held():
    engine = opened(SAMPLINGS[0])
    engine.hold(A.stream, True)
    engine.submit(A, Advance(1, 4, (1,), budget=Budget(2, 100, 40)))
    growths = rest(engine)
    assert [len(growth.tree) for growth in growths] == [2], "what was asked for"
    engine.hold(A.stream, False)
    assert rest(engine)[-1].end is not None


def test_a_drain_waits_for_no_stream_that_is_held():
    engine = opened(SAMPLINGS[0])
    engine.hold(A.stream, True)
    engine.submit(A, Advance(1, 4, (1,), budget=Budget(2, 100, 40)))
    rest(engine)
    engine.drain()
    while not engine.idle:
        results = engine.step()
    assert isinstance(results[-1][1], Draining)
