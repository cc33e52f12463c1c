"""What is sent of the trie before the verdict, and what is made of it afterwards."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.drafting.speculation import Speculation
from orchestrator.rounds import Source
from orchestrator.sequence import Sequence
from specdec.core.rounds import Growth, GrowthEnd, Verdict
from specdec.core.sequence import Method
from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from tests.models.fake_peers import FakeDraft, FakeLookup, commit, new_sequence, plan

chain = TokenTree.chain
PLAN = plan(2, next_round_after_s=0.0)
VERDICT = Verdict(1, 3, (), 0)
GROWN = chain([6, 7, 8, 9, 1]).merge(chain([6, 5, 4])).merge(chain([3, 2]))
"""From base 3. The first two are verified; below them, beside them and instead of them more has grown."""


async def flying(chains: bool = False, **options) -> tuple[Sequence, Speculation, FakeDraft]:
    """6 and 7 are at the target, and the rest has grown meanwhile."""
    draft = FakeDraft()
    sequence = new_sequence(**options)
    speculation = Speculation(draft, max_ahead=16, lookup=FakeLookup(0, 0), chains=chains)
    speculation.advance(sequence, plan(2))
    commit(sequence, 5)
    speculation.advance(sequence, PLAN)
    draft.grow(3, GROWN.prefix(2))
    proposal = await speculation.next(sequence)
    assert proposal.tree == chain([6, 7])
    draft.pushed = [Growth(draft.num_advances, 3, (), GROWN, GrowthEnd.BUDGET)]
    return sequence, speculation, draft


async def test_all_that_has_grown_is_sent_likeliest_first():
    sequence, speculation, _ = await flying()
    tree, max_nodes = speculation.next_round(sequence)
    assert {tree.path_ids(leaf) for leaf in range(len(tree))} == {GROWN.path_ids(leaf) for leaf in range(len(GROWN))}
    assert max_nodes == 2
    for path in ([6], [6, 5], [6, 7, 8], [3]):
        left = tree.descend(path)
        assert left.prefix(2) == speculation._chances.best(left, 2), "whatever is committed, its likeliest come first"


async def test_of_what_is_sent_to_a_target_that_verifies_chains_every_verdict_leaves_a_chain():
    sequence, speculation, draft = await flying(chains=True)
    forked = GROWN.merge(chain([6, 7, 8, 5])).merge(chain([6, 5, 3])).merge(chain([3, 1]))
    draft.pushed = [Growth(draft.num_advances, 3, (), forked, GrowthEnd.BUDGET)]
    tree, _ = speculation.next_round(sequence)
    assert tree == GROWN.part(speculation._chances.likeliest(GROWN)), "only nodes in flight have several children"
    assert all(tree.descend(path).is_chain for path in ([6, 7, 8], [6, 5], [3]))


@pytest.mark.parametrize(("committed", "left"), [([6, 7, 8], [9, 1]), ([6, 5], [4]), ([3], [2]), ([6, 7, 8, 9], [1])])
async def test_what_stands_is_verified_next_and_told_to_the_draft(committed, left):
    sequence, speculation, draft = await flying()
    speculation.next_round(sequence)
    commit(sequence, *committed)
    speculation.advance(sequence, PLAN, VERDICT)
    assert draft.in_flight[-1] == chain(left)
    assert draft.budgets[-1].max_nodes == 0, "no more is waited for"
    proposal = await speculation.next(sequence)
    assert proposal.tree == chain(left)
    assert proposal.drafting.arrived
    assert proposal.drafting.waited_s is None


async def test_what_grew_since_is_for_the_round_after():
    sequence, speculation, draft = await flying()
    speculation.next_round(sequence)
    draft.pushed = [Growth(draft.num_advances, 3, (6, 7, 8), chain([0, 0]), GrowthEnd.BUDGET)]
    commit(sequence, 6, 7, 8)
    speculation.advance(sequence, PLAN, VERDICT)
    proposal = await speculation.next(sequence)
    assert proposal.tree == chain([9, 1])
    tree, _ = speculation.next_round(sequence)
    assert tree.walk([0, 0]) is not None


async def test_after_one_that_came_too_late_and_has_nothing_left_the_round_does_not_wait():
    sequence, speculation, draft = await flying()
    speculation.next_round(sequence)
    commit(sequence, 0)
    speculation.advance(sequence, PLAN, VERDICT)
    assert (await speculation.next(sequence)).tree == EMPTY_TREE
    assert draft.budgets[-1].max_nodes == 0


@pytest.mark.parametrize(
    "verdict", [replace(VERDICT, dropped_round=2), replace(VERDICT, round=0)], ids=["dropped", "open"]
)
async def test_where_it_was_dropped_or_the_target_opened_anew_all_is_as_ever(verdict):
    sequence, speculation, draft = await flying()
    speculation.next_round(sequence)
    commit(sequence, 0)
    speculation.advance(sequence, PLAN, verdict)
    assert draft.budgets[-1].max_nodes == 2
    draft.grow(4, chain([1, 2]))
    assert (await speculation.next(sequence)).tree == chain([1, 2])


async def test_a_lookup_proposal_does_not_take_the_place_of_what_is_at_the_target_already():
    sequence, speculation, _ = await flying()
    speculation.next_round(sequence)
    commit(sequence, 6, 7, 8)
    speculation.advance(sequence, plan(2, lookup=0, next_round_after_s=0.0), VERDICT)
    proposal = await speculation.next(sequence)
    assert (proposal.tree, proposal.source) == (chain([9, 1]), Source.DRAFT)


async def test_where_nothing_is_there_but_what_is_verified_nothing_is_sent():
    sequence, speculation, draft = await flying()
    draft.pushed.clear()
    assert speculation.next_round(sequence) == (EMPTY_TREE, 0)


@pytest.mark.parametrize(("remaining", "sent"), [(3, False), (4, True), (9, True)])
async def test_nor_where_the_verdict_may_be_the_last(remaining, sent):
    sequence, speculation, draft = await flying(max_tokens=1 + remaining)
    draft.pushed = [Growth(draft.num_advances, 3, (6,), chain([5]), GrowthEnd.BUDGET)]
    assert bool(speculation.next_round(sequence)[0]) == sent


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
async def test_nor_where_distributions_are_verified(method):
    draft = FakeDraft()
    sequence, speculation = new_sequence(method=method), Speculation(draft, max_ahead=16)
    commit(sequence, 5)
    speculation.advance(sequence, PLAN)
    draft.grow(3, chain([6, 7]))
    await speculation.next(sequence)
    assert speculation.next_round(sequence) == (EMPTY_TREE, 0)


async def test_nor_after_a_lookup_proposal():
    draft = FakeDraft()
    sequence, speculation = new_sequence(), Speculation(draft, max_ahead=16, lookup=FakeLookup(0, 0))
    speculation.advance(sequence, plan(2))
    commit(sequence, 5)
    speculation.advance(sequence, plan(2, lookup=0, next_round_after_s=0.0))
    proposal = await speculation.next(sequence)
    assert proposal.source is Source.LOOKUP
    assert speculation.next_round(sequence) == (EMPTY_TREE, 0)


async def test_no_more_is_sent_than_the_target_looks_at_in_no_time():
    sequence, speculation, draft = await flying()
    wide = TokenTree(tuple(range(10, 1010)), (ROOT,) * 1000)
    draft.pushed = [Growth(draft.num_advances, 3, (6, 7), wide, GrowthEnd.BUDGET)]
    tree, _ = speculation.next_round(sequence)
    assert len(tree) == 256
    assert tree.problem(2000) is None
