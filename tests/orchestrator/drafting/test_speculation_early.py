"""What is sent of the trie before the verdict, and what is made of it afterwards."""

from __future__ import annotations

import pytest

from orchestrator.drafting.speculation import Speculation
from orchestrator.rounds import Guess, Rival, RoundPlan
from orchestrator.sequence import Sequence
from specdec.core.rounds import Budget, Growth, GrowthEnd
from specdec.core.sequence import Method
from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from tests.models.fake_peers import FakeDraft, commit, new_sequence

chain = TokenTree.chain
PLAN = RoundPlan(Budget(2, 2), early=True)
GROWN = chain([6, 7, 8, 9, 1]).merge(chain([6, 5, 4])).merge(chain([3, 2]))
"""From base 3. The first two are verified; below them, beside them and instead of them more has grown."""


async def flying(plan: RoundPlan = PLAN, **options) -> tuple[Sequence, Speculation, FakeDraft, list]:
    """6 and 7 are at the target, and the rest has grown meanwhile."""
    draft = FakeDraft()
    sequence, speculation = new_sequence(**options), Speculation(draft, max_ahead=16)
    speculation.advance(sequence, RoundPlan(Budget(2, 2)))
    commit(sequence, 5)
    speculation.advance(sequence, plan)
    draft.grow(3, GROWN.prefix(2))
    proposal = await speculation.next(sequence)
    assert proposal.tree == chain([6, 7])
    draft.pushed = [Growth(draft.num_advances, 3, (), GROWN, GrowthEnd.BUDGET)]
    return sequence, speculation, draft, [proposal]


async def test_all_that_has_grown_is_sent_likeliest_first():
    _, speculation, _, [proposal] = await flying()
    tree, max_nodes = proposal.early()
    assert {tuple(tree.token_ids[node] for node in tree.path(leaf)) for leaf in range(len(tree))} == {
        tuple(GROWN.token_ids[node] for node in GROWN.path(leaf)) for leaf in range(len(GROWN))
    }
    assert max_nodes == 2
    for path in ([6], [6, 5], [6, 7, 8], [3]):
        left = tree.descend(path)
        assert left.prefix(2) == speculation._chances.best(left, 2), "whatever is committed, its likeliest come first"


@pytest.mark.parametrize(("committed", "left"), [([6, 7, 8], [9, 1]), ([6, 5], [4]), ([3], [2]), ([6, 7, 8, 9], [1])])
async def test_what_stands_is_verified_next_and_told_to_the_draft(committed, left):
    sequence, speculation, draft, [proposal] = await flying()
    tree, max_nodes = proposal.early()
    commit(sequence, *committed)
    speculation.advance(sequence, PLAN, tree.descend(committed).prefix(max_nodes))
    assert draft.in_flight[-1] == chain(left)
    assert draft.budgets[-1].max_nodes == 0, "nobody waits for more"
    proposal = await speculation.next(sequence)
    assert proposal.tree == chain(left)
    assert proposal.foreseen
    assert proposal.waited_s is None


async def test_what_grew_since_is_for_the_round_after():
    sequence, speculation, draft, [proposal] = await flying()
    proposal.early()
    draft.pushed = [Growth(draft.num_advances, 3, (6, 7, 8), chain([0, 0]), GrowthEnd.BUDGET)]
    commit(sequence, 6, 7, 8)
    speculation.advance(sequence, PLAN, chain([9, 1]))
    proposal = await speculation.next(sequence)
    assert proposal.tree == chain([9, 1])
    tree, _ = proposal.early()
    assert tree.walk([0, 0]) is not None


async def test_one_that_came_too_late_and_has_nothing_left_is_waited_for_by_nobody():
    sequence, speculation, draft, [proposal] = await flying()
    proposal.early()
    commit(sequence, 0)
    speculation.advance(sequence, PLAN, EMPTY_TREE)
    assert (await speculation.next(sequence)).tree == EMPTY_TREE
    assert draft.budgets[-1].max_nodes == 0


async def test_where_it_was_dropped_all_is_as_ever():
    sequence, speculation, draft, [proposal] = await flying()
    proposal.early()
    commit(sequence, 0)
    speculation.advance(sequence, PLAN)
    assert draft.budgets[-1].max_nodes == 2
    draft.grow(4, chain([1, 2]))
    assert (await speculation.next(sequence)).tree == chain([1, 2])


async def test_a_guess_does_not_take_the_place_of_what_is_at_the_target_already():
    sequence, speculation, _, [proposal] = await flying()
    proposal.early()
    commit(sequence, 6, 7, 8)
    plan = RoundPlan(Budget(2, 2), guess=Guess(chain([0, 0]), Rival.TREE), early=True)
    speculation.advance(sequence, plan, chain([9, 1]))
    proposal = await speculation.next(sequence)
    assert (proposal.tree, proposal.guessed) == (chain([9, 1]), None)


async def test_where_nothing_is_there_but_what_is_verified_nothing_is_sent():
    _, _, draft, [proposal] = await flying()
    draft.pushed.clear()
    assert proposal.early() == (EMPTY_TREE, 0)


@pytest.mark.parametrize(("remaining", "sent"), [(3, False), (4, True), (9, True)])
async def test_nor_where_the_verdict_may_be_the_last(remaining, sent):
    _, _, draft, [proposal] = await flying(max_tokens=1 + remaining)
    draft.pushed = [Growth(draft.num_advances, 3, (6,), chain([5]), GrowthEnd.BUDGET)]
    assert bool(proposal.early()[0]) == sent


@pytest.mark.parametrize(
    ("plan", "options"),
    [(RoundPlan(Budget(2, 2)), {}), (PLAN, dict(method=Method.TOKEN)), (PLAN, dict(method=Method.BLOCK))],
)
async def test_nor_where_it_is_not_planned_or_distributions_are_verified(plan, options):
    draft = FakeDraft()
    sequence, speculation = new_sequence(**options), Speculation(draft, max_ahead=16)
    speculation.advance(sequence, RoundPlan(Budget(2, 2)))
    commit(sequence, 5)
    speculation.advance(sequence, plan)
    draft.grow(3, chain([6, 7]))
    assert (await speculation.next(sequence)).early is None


async def test_nor_after_a_guess():
    draft = FakeDraft()
    sequence, speculation = new_sequence(), Speculation(draft, max_ahead=16)
    speculation.advance(sequence, RoundPlan(Budget(2, 2)))
    commit(sequence, 5)
    speculation.advance(sequence, RoundPlan(Budget(2, 2), guess=Guess(chain([1, 2]), Rival.WAIT), early=True))
    proposal = await speculation.next(sequence)
    assert proposal.guessed is Rival.WAIT
    assert proposal.early is None


async def test_no_more_is_sent_than_the_target_looks_at_in_no_time():
    _, _, draft, [proposal] = await flying()
    wide = TokenTree(tuple(range(10, 1010)), (ROOT,) * 1000)
    draft.pushed = [Growth(draft.num_advances, 3, (6, 7), wide, GrowthEnd.BUDGET)]
    tree, _ = proposal.early()
    assert len(tree) == 256
    assert tree.problem(2000) is None
