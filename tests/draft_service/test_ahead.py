"""Growing below what is in flight: where, and that every node is what the draft would propose anyway."""

from __future__ import annotations

import random

import pytest

from draft_service.engine import DraftOpen
from specdec.core.rounds import Advance, Budget, Growth, GrowthEnd
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.server.step_loop import Key
from tests.draft_service.engines import (
    SAMPLINGS,
    A,
    B,
    check_proposed,
    children,
    opened,
    ranked,
    rest,
    rest_by_key,
    sequence_of,
    together,
)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_after_a_verdict_it_goes_on_from_the_branch_that_came_true(sampling):
    """Again and again, with the orchestrator's part played by chance."""
    engine, random_ = opened(sampling), random.Random(5)
    ids, tree, number = [1, 2, 3], EMPTY_TREE, 0
    hits = 0
    for _ in range(50):
        number += 1
        new = ids[sequence_of(engine).base :]
        flying = tree.prefix(3)
        budget = Budget(0 if flying else 3, 9, 30)
        engine.submit(A, Advance(number, len(ids), tuple(new), flying, budget))
        for _ in range(random_.randrange(1, 9)):
            if engine.idle:
                break
            for _, growth in engine.step():
                if growth.base == len(ids):
                    tree = tree.merge(growth.tree.under(growth.path))
        assert tree.problem(64) is None
        check_proposed(sampling, ids, tree)
        flying = flying or tree.prefix(3)
        # A verdict: some path of what flies, and one token more, which may have been foreseen.
        committed, node = [], ROOT
        while (known := children(flying, node)) and random_.random() < 0.7:
            committed.append(random_.choice(known))
            node = flying.child(node, committed[-1])
        expected = set(known)
        foreseen = [token for token in children(tree, tree.walk(committed)) if token not in expected]
        guess = random_.choice(foreseen) if foreseen and random_.random() < 0.7 else random_.randrange(8)
        if guess in expected:
            continue
        committed.append(guess)
        tree = tree.descend(committed)
        hits += bool(tree)
        ids += committed
    assert hits > 3


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_without_a_request_for_nodes_it_grows_below_the_last_token(sampling):
    engine = opened(sampling)
    engine.submit(A, Advance(1, 5, (4, 6), budget=Budget(0, 9, 12)))
    growths = rest(engine)
    tree = together(growths)
    assert len(tree) == 12
    assert growths[-1].end is GrowthEnd.BUDGET
    check_proposed(sampling, [1, 2, 3, 4, 6], tree)


def test_a_draft_that_is_right_grows_deep_and_one_that_is_not_grows_wide():
    trees = {}
    for right in (True, False):
        engine, ids = opened(SamplingParams(0.0)), [1, 2, 3]
        for number in range(1, 60):
            engine.submit(A, Advance(number, len(ids), tuple(ids[sequence_of(engine).base :]), budget=Budget(2, 9, 9)))
            tree = together(rest(engine))
            ids.append(tree.token_ids[0] if right else (tree.token_ids[0] + 1) % 8)
        trees[right] = tree
    assert max(trees[True].depths) > max(trees[False].depths)
    assert trees[False].parents.count(ROOT) > trees[True].parents.count(ROOT)


def test_several_sequences_grow_ahead_in_one_pass_and_only_when_none_waits_for_a_token():
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
    all_growths: dict[Key, list[Growth]] = {A: [], B: []}
    while len(together(all_growths[B])) < 2:
        for key, growth in engine.step():
            all_growths[key].append(growth)
            assert key is B or growth.advance == 1
    for key, growth in rest_by_key(engine):
        all_growths[key].append(growth)
    assert len(together(all_growths[A], TokenTree.chain([1, 2]))) == 2 + 6
    assert len(together(all_growths[B])) == 2 + 6


def test_a_branching_tree_in_flight_beside_new_nodes_does_no_harm() -> None:
    engine = opened(SamplingParams(0.0))
    first = ranked(SamplingParams(0.0), [1, 2, 3])[0]
    second = ranked(SamplingParams(0.0), [1, 2, 3, first])[0]
    branching = TokenTree((first, (first + 1) % 8, second), (ROOT, ROOT, 0))
    engine.submit(A, Advance(1, 3, (), branching, Budget(5, 20, max_ahead=8)))
    growths = rest(engine)
    assert growths[-1].end is GrowthEnd.BUDGET
    check_proposed(SamplingParams(0.0), [1, 2, 3], together(growths, branching), all_grown=False)
