"""The trie: nodes count while their path matches what was committed, and a draft can do no harm."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.drafting.speculation import Speculation
from orchestrator.sequence import Sequence
from specdec.core.rounds import Growth, GrowthEnd, Verdict
from specdec.core.sequence import Method
from specdec.core.tree import EMPTY_TREE, MAX_TREE_NODES, ROOT, SparseDistribution, TokenTree
from tests.models.fake_peers import FakeDraft, commit, new_sequence, plan

chain = TokenTree.chain
KEYED = [dict(), dict(method=Method.TOKEN, temperature=0.0), dict(method=Method.BLOCK, temperature=0.0)]
CHAINED = [dict(method=Method.TOKEN), dict(method=Method.BLOCK)]


def probs(*token_ids: int) -> TokenTree:
    return chain(token_ids, [SparseDistribution((token_id,), (1.0,)) for token_id in token_ids])


def begun(draft: FakeDraft, **options) -> tuple[Sequence, Speculation]:
    """After the first token (5), with one advance out: the base is 3."""
    sequence, speculation = new_sequence(**options), Speculation(draft)
    speculation.advance(sequence, plan())
    commit(sequence, 5)
    speculation.advance(sequence, plan(4))
    return sequence, speculation


async def test_before_the_first_token_the_tree_is_empty_and_the_round_does_not_wait():
    draft = FakeDraft()
    sequence, speculation = new_sequence(), Speculation(draft)
    speculation.advance(sequence, plan(4))
    assert draft.num_advances == 1, "the draft's prefill begins beside the target's"
    assert (await speculation.next(sequence)).tree == EMPTY_TREE


@pytest.mark.parametrize("options", [*KEYED, *CHAINED])
async def test_what_the_draft_grew_is_what_is_verified(options):
    draft = FakeDraft()
    sequence, speculation = begun(draft, **options)
    draft.grow(3, chain([6, 7]))
    assert (await speculation.next(sequence)).tree == chain([6, 7])
    assert not draft.script


@pytest.mark.parametrize("options", [*KEYED, *CHAINED])
async def test_a_growth_in_parts_is_one_tree(options):
    draft = FakeDraft()
    sequence, speculation = begun(draft, **options)
    draft.grow(3, probs(6), end=None)
    draft.grow(3, probs(7, 8), path=(6,), end=GrowthEnd.UNLIKELY)
    tree = (await speculation.next(sequence)).tree
    assert tree.token_ids == (6, 7, 8)
    assert tree.is_chain


@pytest.mark.parametrize("end", list(GrowthEnd))
async def test_the_wait_ends_with_the_growth_whatever_ended_it(end):
    draft = FakeDraft()
    sequence, speculation = begun(draft)
    draft.grow(3, chain([6]), end=end)
    assert (await speculation.next(sequence)).tree == chain([6])


@pytest.mark.parametrize("options", KEYED)
async def test_late_growth_counts_where_its_path_matches_what_was_committed(options):
    draft = FakeDraft()
    sequence, speculation = begun(draft, **options)
    commit(sequence, 6, 7)
    speculation.advance(sequence, plan(4))
    draft.grow(3, chain([6, 7, 8, 9]), advance=1, end=GrowthEnd.SUPERSEDED)
    draft.grow(3, TokenTree((7, 0, 4), (-1, 0, -1)), path=(6,), advance=1)
    draft.grow(5, EMPTY_TREE)
    tree = (await speculation.next(sequence)).tree
    assert tree == TokenTree((8, 9, 0), (-1, 0, -1))


@pytest.mark.parametrize("options", KEYED)
async def test_late_growth_that_does_not_match_is_dropped(options):
    draft = FakeDraft()
    sequence, speculation = begun(draft, **options)
    commit(sequence, 6, 7)
    speculation.advance(sequence, plan(4))
    draft.grow(3, chain([6, 8, 9]), advance=1)
    draft.grow(3, chain([7, 9]), path=(9,), advance=1)
    draft.grow(5, chain([1]))
    assert (await speculation.next(sequence)).tree == chain([1])
    assert not draft.ejected_for


async def test_what_is_left_of_the_trie_after_a_verdict_is_verified_next():
    draft = FakeDraft()
    sequence, speculation = begun(draft)
    draft.grow(3, TokenTree((6, 7, 8, 9), (-1, 0, 1, 0)))
    await speculation.next(sequence)
    commit(sequence, 6)
    draft.there = False
    speculation.advance(sequence, plan(4))
    assert (await speculation.next(sequence)).tree == TokenTree((7, 8, 9), (-1, 0, -1))
    commit(sequence, 3)
    speculation.advance(sequence, plan(4))
    assert (await speculation.next(sequence)).tree == EMPTY_TREE


@pytest.mark.parametrize("options", CHAINED)
async def test_a_draft_whose_chain_the_target_refuses_is_ejected(options):
    draft = FakeDraft()
    sequence, speculation = begun(draft, **options)
    draft.grow(3, probs(6, 7, 8))
    await speculation.next(sequence)
    commit(sequence, 6)
    speculation.advance(sequence, plan(4), Verdict(1, 3, (), 6, refused=True))
    assert draft.ejected_for


@pytest.mark.parametrize("options", CHAINED)
async def test_under_token_and_block_the_trie_is_cleared_at_every_verdict(options):
    draft = FakeDraft()
    sequence, speculation = begun(draft, **options)
    draft.grow(3, probs(6, 7, 8))
    await speculation.next(sequence)
    commit(sequence, 6)
    draft.there = False
    speculation.advance(sequence, plan(4))
    assert (await speculation.next(sequence)).tree == EMPTY_TREE


@pytest.mark.parametrize("options", CHAINED)
async def test_under_token_and_block_growth_of_an_older_base_is_not_used(options):
    draft = FakeDraft()
    sequence, speculation = begun(draft, **options)
    commit(sequence, 6)
    speculation.advance(sequence, plan(4))
    draft.grow(3, probs(6, 7, 8), advance=1, end=GrowthEnd.SUPERSEDED)
    draft.grow(4, probs(9))
    assert (await speculation.next(sequence)).tree == probs(9)


@pytest.mark.parametrize("options", CHAINED)
async def test_half_a_chain_is_dropped_whole_when_the_draft_is_lost(options):
    draft = FakeDraft()
    sequence, speculation = begun(draft, **options)
    draft.grow(3, probs(6, 7), end=None)
    draft.script.append(None)
    assert (await speculation.next(sequence)).tree == EMPTY_TREE


async def test_under_coupled_sampling_half_a_chain_is_as_good_as_a_whole_one():
    draft = FakeDraft()
    sequence, speculation = begun(draft)
    draft.grow(3, chain([6, 7]), end=None)
    draft.script.append(None)
    assert (await speculation.next(sequence)).tree == chain([6, 7])


@pytest.mark.parametrize("options", [*KEYED, *CHAINED])
async def test_no_draft_is_an_empty_tree(options):
    draft = FakeDraft()
    draft.there = False
    sequence, speculation = begun(draft, **options)
    assert (await speculation.next(sequence)).tree == EMPTY_TREE


@pytest.mark.parametrize("options", [*KEYED, *CHAINED])
async def test_without_a_grant_nothing_is_asked_for(options):
    draft = FakeDraft()
    sequence, speculation = begun(draft, **options)
    draft.grow(3, chain([6]))
    await speculation.next(sequence)
    commit(sequence, 9)
    speculation.advance(sequence, plan())
    assert draft.num_advances == 1
    assert (await speculation.next(sequence)).tree == EMPTY_TREE


async def test_what_was_asked_for_before_may_be_deeper_than_what_is_asked_for_now():
    draft = FakeDraft()
    sequence, speculation = begun(draft)
    commit(sequence, 1)
    speculation.advance(sequence, plan(1))
    draft.grow(4, chain([2, 3, 4]))
    assert (await speculation.next(sequence)).tree == chain([2])
    assert not draft.ejected_for


async def test_a_draft_that_goes_deeper_than_was_asked_for_is_ejected():
    draft = FakeDraft()
    sequence, speculation = begun(draft)
    draft.grow(3, chain([1, 2, 3, 4, 5, 6]))
    assert (await speculation.next(sequence)).tree == EMPTY_TREE
    assert draft.ejected_for


async def test_a_draft_of_which_nothing_was_asked_for_long_may_say_that_it_knows_the_text():
    draft = FakeDraft()
    sequence, speculation = new_sequence(max_tokens=100), Speculation(draft)
    speculation.advance(sequence, plan(2))
    commit(sequence, *range(40))
    speculation.advance(sequence, plan())
    draft.pushed = [Growth(1, sequence.base, (), EMPTY_TREE, GrowthEnd.BUDGET)]
    commit(sequence, 7)
    speculation.advance(sequence, plan())
    assert not draft.ejected_for


# --- hostile drafts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [0, 1, 4, 2**32 - 1])
@pytest.mark.parametrize("options", [*KEYED, *CHAINED])
async def test_a_growth_from_where_no_base_can_be_is_refused(base, options):
    draft = FakeDraft()
    sequence, speculation = begun(draft, **options)
    draft.grow(base, chain([6]))
    assert (await speculation.next(sequence)).tree == EMPTY_TREE
    assert len(draft.ejected_for) == 1


@pytest.mark.parametrize("options", CHAINED)
@pytest.mark.parametrize(
    "growths",
    [
        [(TokenTree((6, 7), (-1, -1)), ())],
        [(probs(1, 2, 3, 4, 5), ())],
        # Each a chain, together none.
        [(probs(6, 7), ()), (probs(8), ())],
        [(probs(6, 7), ()), (probs(8), (6,))],
        # Each short enough, together not.
        [(probs(1, 2, 3), ()), (probs(4, 5), (1, 2, 3))],
    ],
)
async def test_under_token_and_block_anything_but_the_chain_asked_for_is_refused(options, growths):
    draft = FakeDraft()
    sequence, speculation = begun(draft, **options)
    for number, (tree, path) in enumerate(growths):
        draft.grow(3, tree, path=path, end=GrowthEnd.BUDGET if number == len(growths) - 1 else None)
    assert (await speculation.next(sequence)).tree == EMPTY_TREE
    assert len(draft.ejected_for) == 1


@pytest.mark.parametrize("options", KEYED)
async def test_distributions_that_were_not_asked_for_do_not_reach_the_target(options):
    """It would refuse them in a tree that branches, and the request would fail for what the draft did."""
    draft = FakeDraft()
    sequence, speculation = begun(draft, **options)
    draft.grow(3, probs(6, 7), end=None)
    draft.grow(3, chain([6, 8]), end=None)
    draft.grow(3, probs(9))
    tree = (await speculation.next(sequence)).tree
    assert tree == TokenTree((6, 7, 8, 9), (-1, 0, 0, -1))
    assert not tree.draft_probs


@pytest.mark.parametrize("options", [*KEYED, *CHAINED])
async def test_a_refused_draft_does_not_stop_the_next_round(options):
    draft = FakeDraft()
    sequence, speculation = begun(draft, **options)
    draft.grow(99, chain([6]))
    await speculation.next(sequence)
    commit(sequence, 6)
    speculation.advance(sequence, plan(4))
    draft.grow(4, chain([7]))
    assert (await speculation.next(sequence)).tree == chain([7])


async def test_growths_that_have_arrived_are_taken_in_parts():
    """A legal flood: the rest is taken after the next verdict, while others run."""
    draft = FakeDraft()
    sequence, speculation = begun(draft)
    siblings = TokenTree(tuple(range(1000)), (ROOT,) * 1000)
    flood = [Growth(1, 3, (), siblings, None)] * 50
    waiting = iter(flood)
    draft.arrived = lambda: waiting
    commit(sequence, 5)
    speculation.advance(sequence, plan())
    assert len(list(waiting)) == 50 - 5, "1,001 entries each, 4,096 in a turn"


async def test_a_growth_costs_time_for_its_own_nodes_and_not_for_the_trie(monkeypatch):
    draft = FakeDraft()
    sequence, speculation = begun(draft)
    siblings = TokenTree(tuple(range(1000)), (ROOT,) * 1000)
    draft.grow(3, siblings, end=None, advance=0)
    for token_id in range(200):
        draft.grow(3, chain([token_id, 7]), end=None, advance=0)
    draft.grow(3, EMPTY_TREE)
    made = []
    check = TokenTree.__init__
    monkeypatch.setattr(
        TokenTree,
        "__init__",
        lambda self, ids, *rest, **named: (made.append(len(ids)), check(self, ids, *rest, **named))[1],
    )
    await speculation.next(sequence)
    assert not draft.script
    assert sum(made) < 5 * 1000 + 200 * 10


async def test_a_trie_has_no_more_nodes_than_a_tree_may_have():
    draft = FakeDraft()
    sequence, speculation = begun(draft)
    for number in range(9):
        siblings = TokenTree(tuple(range(1000 * number, 1000 * number + 1000)), (ROOT,) * 1000)
        draft.grow(3, siblings, end=None, advance=0)
    draft.grow(3, EMPTY_TREE)
    await speculation.next(sequence)
    assert len(speculation._trie) == MAX_TREE_NODES


async def test_a_draft_that_sends_much_does_not_keep_others_waiting():
    draft = FakeDraft()
    sequence, speculation = begun(draft)
    for _ in range(100):
        draft.grow(3, EMPTY_TREE, end=None)
    draft.grow(3, EMPTY_TREE)
    draft.growth = lambda *_: immediately(draft.script.pop(0))
    others = 0
    waiting = asyncio.create_task(speculation.next(sequence))
    while not waiting.done():
        await asyncio.sleep(0)
        others += 1
    assert others >= 100


async def immediately(growth: Growth) -> Growth:
    return growth
