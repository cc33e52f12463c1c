"""What is told of a tree that grows ahead: the requested nodes at once, all others once, whatever comes between."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.rounds import Advance, Budget, GrowthEnd
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.server.step_loop import Key
from tests.draft_service.engines import SAMPLINGS, A, check_proposed, opened, paths, rest, sequence_of, together
from tests.models.table_runner import TableRunner


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_the_requested_nodes_come_first_and_then_those_below_them(sampling):
    engine = opened(sampling)
    engine.submit(A, Advance(1, 3, budget=Budget(3, 9, 12)))
    first, *ahead, end = rest(engine)
    chain = first.tree
    assert (first.end, first.advance, len(chain), chain.is_chain) == (None, 1, 3, True)
    assert end.end is GrowthEnd.BUDGET
    assert not end.tree, "all of it was said"
    whole = together([first, *ahead])
    assert len(whole) == 3 + 12
    assert len({tuple(path) for growth in ahead for path in paths(growth.tree.under(growth.path))}) >= 12
    assert whole.prefix(3) == chain
    assert whole.problem(64) is None
    assert all(whole.parents.count(node) > 1 for node in (ROOT, 0, 1)), "corrections"
    assert max(whole.depths) > 3, "what follows if all of it is right"
    check_proposed(sampling, [1, 2, 3], whole)


@pytest.mark.parametrize("num_ids", [3, 700, 2000])
@pytest.mark.parametrize("seed", range(3))
def test_all_that_has_grown_has_been_told_once_the_engine_rests(num_ids, seed):
    """Also where advances were superseded, the prompt takes long, or nothing may be added any more."""
    chance = random.Random(seed)
    engine = DraftEngine(LanguageModelDrafter(TableRunner(seed=3, num_slots=1 << 15, context_length=1 << 12)))
    ids = [chance.randrange(8) for _ in range(num_ids)]
    engine.open(A, DraftOpen(SequenceSpec(tuple(ids), num_ids, SamplingParams(0.0)), Budget(0, 9, 12)))
    known = EMPTY_TREE
    for number in range(1, 30):
        for _ in range(chance.choice([0, 1, 4, 5, 6, 200])):
            for _, growth in [] if engine.idle else engine.step():
                base = growth.base - len(ids)
                assert base <= 0, "what is said is of what was committed"
                known = known.merge(growth.tree.under(growth.path).descend(ids[growth.base :]))
        if engine.idle:
            assert known.merge(sequence_of(engine).tree) == known
        likely = sequence_of(engine).tree.token_ids[:1]
        new = chance.choice([[], [*likely], [*likely], [*likely, chance.randrange(8)]])
        known = known.descend(new)
        ids += new
        depth = chance.choice([2, 4, 13])
        flying = known.prefix(chance.choice([0, 3])) if depth > 3 else EMPTY_TREE
        nodes = 0 if flying or depth < 13 else chance.choice([0, 6])
        engine.submit(A, Advance(number, len(ids), tuple(new), flying, Budget(nodes, depth, chance.choice([4, 20]))))
    for growth in rest(engine, 1000):
        known = known.merge(growth.tree.under(growth.path).descend(ids[growth.base :]))
    tree = sequence_of(engine).tree
    assert known.merge(tree) == known
    assert tree


@pytest.mark.parametrize(("num_ids", "flying"), [(6000, 0), (2000, 4)])
def test_a_prompt_that_takes_several_passes_delays_what_grows_ahead_and_loses_nothing(num_ids, flying):
    def grown(first: Budget) -> TokenTree:
        engine = DraftEngine(LanguageModelDrafter(TableRunner(seed=3, num_slots=1 << 14, context_length=1 << 13)))
        ids = tuple(i % 8 for i in range(num_ids))
        engine.open(A, DraftOpen(SequenceSpec(ids, num_ids, SamplingParams(0.0)), first))
        if not first.max_ahead:
            rest(engine)
        in_flight = TokenTree.chain([1, 2, 3, 4][:flying])
        engine.submit(A, Advance(1, num_ids, (), in_flight, Budget(0, 9, 20)))
        growths = rest(engine)
        assert growths[-1].end is GrowthEnd.BUDGET
        return together(growths, in_flight)

    tree = grown(Budget(0, 9, 20))
    assert tree == grown(Budget()), "as if it had been there before"
    assert len(tree) == flying + 20


def test_a_newer_advance_ends_it_between_two_passes():
    engine = opened(SamplingParams(0.0))
    engine.submit(A, Advance(1, 3, budget=Budget(2, 9, 30)))
    for _ in range(4):
        engine.step()
    engine.submit(A, Advance(2, 4, (6,), budget=Budget(2, 2)))
    ends = [(growth.advance, growth.end) for growth in rest(engine)]
    assert ends == [(1, GrowthEnd.SUPERSEDED), (2, GrowthEnd.BUDGET)]


@pytest.mark.parametrize("num_sequences", [4, 16, 32])
def test_in_a_crowd_each_is_told_less_often_and_all_in_the_end(num_sequences):
    engine = DraftEngine(LanguageModelDrafter(TableRunner(seed=3, num_slots=1 << 14)))
    keys = [Key(1, number) for number in range(num_sequences)]
    for key in keys:
        engine.open(key, DraftOpen(SequenceSpec((1, 2, 3), 3, SamplingParams(0.0)), Budget()))
    rest(engine)
    for key in keys:
        engine.submit(key, Advance(1, 3, budget=Budget(0, 9, 20)))
    known, reported, num_passes = dict.fromkeys(keys, EMPTY_TREE), Counter(), 0
    while not engine.idle:
        for key, growth in engine.step():
            known[key] = known[key].merge(growth.tree.under(growth.path))
            reported[key] += not growth.end
        num_passes += len(engine.working_on()) == num_sequences
    assert set(map(len, known.values())) == {20}, "all that was asked for"
    assert set(reported.values()) == {(num_passes - 1) // max(1, num_sequences // 8)}, (
        "the last pass only finds the end"
    )


def test_an_answer_without_a_pass_says_nothing_of_the_passes_before() -> None:
    engine = opened(SamplingParams(0.0))
    engine.submit(A, Advance(1, 4, (5,), EMPTY_TREE, Budget(2, 2)))
    engine.step()
    assert engine.working_on()
    engine.submit(A, Advance(2, 4, (), EMPTY_TREE, Budget()))
    assert engine.step()
    assert not engine.working_on()
