"""More than a chain: what grows ahead of the verdict, and the runners-up that are verified beside it."""

from __future__ import annotations

import pytest

from orchestrator.drafting.speculation import Speculation
from orchestrator.sequence import Sequence
from specdec.core.rounds import Budget, Growth, GrowthEnd, Verdict
from specdec.core.sequence import Method
from specdec.core.tree import EMPTY_TREE, TokenTree
from tests.models.fake_peers import FakeDraft, commit, new_sequence, plan

chain = TokenTree.chain


def flying(draft: FakeDraft, **options) -> tuple[Sequence, Speculation]:
    """The base is 3, and [6, 7] is being verified."""
    sequence, speculation = new_sequence(**options), Speculation(draft, max_ahead=20)
    speculation.advance(sequence, plan())
    commit(sequence, 5)
    speculation.advance(sequence, plan(2))
    draft.grow(3, chain([6, 7]), end=None)
    return sequence, speculation


async def test_what_was_asked_for_is_verified_while_more_may_come():
    draft = FakeDraft()
    sequence, speculation = flying(draft)
    assert draft.budgets == [Budget(2, 5, 20)]
    assert (await speculation.next(sequence)).tree == chain([6, 7])


@pytest.mark.parametrize(
    ("committed", "left"), [([6, 7, 8], [9, 1]), ([6, 2], [3, 4]), ([4], [5])], ids=["bonus", "correction", "first"]
)
async def test_after_a_hit_the_next_tree_is_there_at_once(committed, left):
    draft = FakeDraft()
    sequence, speculation = flying(draft)
    await speculation.next(sequence)
    tree = chain([6, 7, 8, 9, 1]).merge(chain([6, 2, 3, 4])).merge(chain([4, 5]))
    draft.pushed = [Growth(1, 3, (), tree, None)]
    commit(sequence, *committed)
    speculation.advance(sequence, plan(2))
    assert draft.budgets[-1] == Budget(0, 5, 20)
    assert draft.in_flight[-1] == chain(left)
    assert (await speculation.next(sequence)).tree == chain(left), "without a wait"
    assert not draft.ejected_for


async def test_after_a_miss_the_round_waits():
    draft = FakeDraft()
    sequence, speculation = flying(draft)
    await speculation.next(sequence)
    draft.pushed = [Growth(1, 3, (), chain([6, 7, 8]), None)]
    commit(sequence, 6, 1)
    speculation.advance(sequence, plan(2))
    assert (draft.budgets[-1], draft.in_flight[-1]) == (Budget(2, 5, 20), EMPTY_TREE)
    draft.script += [Growth(1, 3, (), chain([6, 7, 8, 9]), GrowthEnd.SUPERSEDED)]
    draft.grow(5, chain([3, 4]), end=None)
    assert (await speculation.next(sequence)).tree == chain([3, 4])


async def test_where_waiting_does_not_pay_the_draft_grows_from_the_last_token():
    draft = FakeDraft()
    sequence, speculation = flying(draft)
    await speculation.next(sequence)
    commit(sequence, 6, 1)
    speculation.advance(sequence, plan(0, 2))
    assert (draft.budgets[-1], draft.in_flight[-1]) == (Budget(0, 5, 20), EMPTY_TREE)
    assert (await speculation.next(sequence)).tree == EMPTY_TREE
    draft.pushed = [Growth(2, 5, (), chain([3, 4]).merge(chain([8, 2])), None)]
    commit(sequence, 8)
    speculation.advance(sequence, plan(0, 2))
    assert draft.in_flight[-1] == chain([2]), "what came meanwhile counts"
    assert (await speculation.next(sequence)).tree == chain([2])
    speculation.advance(sequence, plan())
    assert draft.num_caught_up == 2, "and where nothing is worth growing, nothing is asked for"


@pytest.mark.parametrize(
    ("rounds", "verified"),
    [
        ((1.0, 1.0, 1.0, 1.0, 1.0), [9, 1]),  # rows are free
        ((1.0, 1.0), [9]),  # no more than that
        ((1.0, 1.0, 2.0, 3.0), [9]),
        ((1.0, 2.0, 3.0, 4.0), [9]),  # one at least
    ],
)
async def test_of_what_is_there_as_much_is_verified_as_is_worth_its_time(rounds, verified):
    draft = FakeDraft()
    sequence, speculation = flying(draft)
    await speculation.next(sequence)
    draft.pushed = [Growth(1, 3, (), chain([6, 7, 8, 9, 1]), None)]
    commit(sequence, 6, 7, 8)
    speculation.advance(sequence, plan(2, round_s=rounds))
    assert draft.in_flight[-1] == chain(verified)
    assert draft.budgets[-1].max_nodes == 0
    assert (await speculation.next(sequence)).tree == chain(verified)


async def test_during_autonomous_verdicts_the_draft_begins_and_nothing_is_verified():
    draft = FakeDraft()
    sequence, speculation = flying(draft)
    commit(sequence, 6)
    speculation.advance(sequence, plan(0, 2), Verdict(1, 4, (), 6, num_autonomous_left=1))
    assert (draft.budgets[-1], draft.in_flight[-1]) == (Budget(0, 5, 20), EMPTY_TREE)
    proposal = await speculation.next(sequence)
    assert (proposal.tree, proposal.drafting.arrived) == (EMPTY_TREE, None), "though [7] is there"
    commit(sequence, 7)
    draft.pushed = [Growth(2, 4, (), chain([7, 3, 4]), None)]
    speculation.advance(sequence, plan(0, 2))
    assert draft.in_flight[-1] == chain([3, 4]), "it finds a tree"


async def test_of_what_is_there_the_likeliest_nodes_are_verified():
    draft = FakeDraft()
    sequence, speculation = flying(draft)
    await speculation.next(sequence)
    tree = chain([8, 9]).merge(chain([8, 4])).merge(chain([3]))
    draft.pushed = [Growth(1, 3, (), tree.under((6, 7, 5)), None)]
    commit(sequence, 6, 7, 5)
    speculation.advance(sequence, plan(2, 3))
    flying_now = (await speculation.next(sequence)).tree
    assert flying_now == draft.in_flight[-1]
    # By the ranks' first guess at what they are worth: 0.7 a first child, 0.1 a second one.
    assert flying_now.token_ids == (8, 9, 3)


async def test_near_the_end_nothing_is_grown_that_could_not_be_used():
    draft = FakeDraft()
    sequence, speculation = new_sequence(max_tokens=5), Speculation(draft, max_ahead=20)
    speculation.advance(sequence, plan(4))
    commit(sequence, 5)
    speculation.advance(sequence, plan(3))
    assert draft.budgets[-1].max_depth == 3


async def test_a_draft_that_grows_ahead_deeper_than_it_may_is_ejected():
    draft = FakeDraft()
    sequence, speculation = flying(draft)
    await speculation.next(sequence)
    draft.pushed = [Growth(1, 3, (), chain(range(6)), None)]
    commit(sequence, 6, 7, 8)
    speculation.advance(sequence, plan(2))
    assert draft.ejected_for


@pytest.mark.parametrize("max_ahead", [0, 20])
async def test_siblings_are_verified_with_their_chain_and_none_that_lacks_is_waited_for(max_ahead):
    draft = FakeDraft()
    sequence, speculation = new_sequence(), Speculation(draft, max_ahead, max_siblings=2)
    speculation.advance(sequence, plan())
    commit(sequence, 5)
    speculation.advance(sequence, plan(2))
    assert draft.budgets[-1].max_siblings == 2
    tree = TokenTree((6, 7, 1, 2), (-1, 0, -1, 0))  # one each: the vocabulary is small
    draft.grow(3, tree, end=None if max_ahead else GrowthEnd.BUDGET)
    assert (await speculation.next(sequence)).tree == tree


@pytest.mark.parametrize("further", [dict(max_ahead=20), dict(max_siblings=2)], ids=str)
@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
async def test_under_token_and_block_there_is_nothing_but_the_chain(method, further):
    draft = FakeDraft()
    sequence, speculation = new_sequence(method=method), Speculation(draft, **further)
    commit(sequence, 5)
    speculation.advance(sequence, plan(4))
    assert draft.budgets == [Budget(4, 4)]
