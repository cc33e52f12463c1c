"""A prompt-lookup proposal in place of the draft's tree: what is asked of the draft, and what is counted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.drafting.speculation import Speculation
from orchestrator.replicas.replica import Tally
from orchestrator.rounds import Drafting, Exchange, Proposal, RoundRecord, Source
from orchestrator.sequence import Sequence
from orchestrator.telemetry.metrics import Metrics
from orchestrator.telemetry.round_clock import Split
from specdec.core.rounds import Budget, Growth, Verdict
from specdec.core.tree import EMPTY_TREE, TokenTree
from tests.instruments import total
from tests.models.fake_peers import FakeDraft, FakeLookup, commit, new_sequence, plan

chain = TokenTree.chain


def begun(draft: FakeDraft, *lookup: int, doubtful: bool = True, **options: int) -> tuple[Sequence, Speculation]:
    """The base is 12."""
    sequence = new_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 1], max_tokens=40)
    speculation = Speculation(draft, lookup=FakeLookup(*lookup, doubtful=doubtful), **options)
    speculation.advance(sequence, plan())
    commit(sequence, 2)
    return sequence, speculation


@pytest.mark.parametrize("max_ahead", [0, 20])
async def test_a_proposal_that_is_better_than_waiting_goes_at_once(max_ahead):
    draft = FakeDraft()
    sequence, speculation = begun(draft, 3, 4, 5, max_ahead=max_ahead)
    speculation.advance(sequence, plan(2, lookup=0))
    assert (await speculation.next(sequence)).tree == chain([3, 4, 5])
    assert not any(budget.max_nodes for budget in draft.budgets), "the round does not wait"


async def test_without_growing_ahead_the_draft_only_hears_what_was_committed():
    draft = FakeDraft()
    sequence, speculation = begun(draft, 3, 4, 5)
    before = draft.num_caught_up
    speculation.advance(sequence, plan(2, lookup=0))
    assert (draft.num_advances, draft.num_caught_up) == (0, before + 1)


async def test_a_draft_that_grows_ahead_hears_of_a_doubtful_proposal_and_what_it_grows_there_is_next():
    draft = FakeDraft()
    sequence, speculation = begun(draft, 3, 4, 5, max_ahead=20)
    speculation.advance(sequence, plan(2, lookup=0))
    assert (draft.budgets, draft.in_flight) == ([Budget(0, 6, 20)], [chain([3, 4, 5])])
    proposal = await speculation.next(sequence)
    assert (proposal.tree, proposal.drafting.arrived) == (chain([3, 4, 5]), None), "no tree of the draft was there"
    pushed = chain([3, 4, 5, 7]).merge(chain([3, 8, 1, 2]))
    draft.pushed = [Growth(1, sequence.base, (), pushed, None)]
    commit(sequence, 3, 8)
    speculation.advance(sequence, plan(2))
    proposal = await speculation.next(sequence)
    assert proposal.tree == chain([1, 2])
    assert not draft.ejected_for
    assert proposal.drafting.num_received == 4, "the proposal is not the draft's"


async def test_a_draft_is_not_asked_to_grow_around_a_proposal_that_is_hardly_doubtful():
    draft = FakeDraft()
    sequence, speculation = begun(draft, 3, 4, doubtful=False, max_ahead=20)
    caught_up = draft.num_caught_up
    speculation.advance(sequence, plan(2, lookup=0))
    assert (draft.num_advances, draft.num_caught_up) == (0, caught_up + 1)
    assert (await speculation.next(sequence)).tree == chain([3, 4])


@pytest.mark.parametrize(("place", "verified"), [(1, [7, 8]), (0, [4, 5, 6])])
async def test_a_tree_that_is_there_is_preferred_unless_the_proposal_is_better(place, verified):
    draft = FakeDraft()
    sequence, speculation = begun(draft, 4, 5, 6, max_ahead=20)
    speculation.advance(sequence, plan(2))
    draft.grow(sequence.base, chain([8, 9]), end=None)
    await speculation.next(sequence)
    draft.pushed = [Growth(1, sequence.base, (), chain([3, 7, 8]), None)]
    commit(sequence, 3)
    speculation.advance(sequence, plan(2, 2, lookup=place))
    assert list((await speculation.next(sequence)).tree.token_ids) == verified


@pytest.mark.parametrize("lost", ["not there", "late"])
async def test_where_the_draft_gives_nothing_there_is_the_proposal(lost):
    draft = FakeDraft()
    draft.there = lost != "not there"
    sequence, speculation = begun(draft, 3, 4, 5)
    speculation.advance(sequence, plan(2, lookup=1))
    assert draft.budgets[-1].max_nodes == 2, "the draft comes first"
    if draft.there:
        draft.script.append(None)
    proposal = await speculation.next(sequence)
    assert (proposal.tree, proposal.source) == (chain([3, 4, 5]), Source.LOOKUP)


async def test_what_the_draft_gives_is_verified_where_the_lookup_is_second_best():
    draft = FakeDraft()
    sequence, speculation = begun(draft, 3, 4, 5)
    speculation.advance(sequence, plan(2, lookup=1))
    draft.grow(sequence.base, chain([7, 8]))
    proposal = await speculation.next(sequence)
    drafting = replace(proposal.drafting, waited_s=None)
    assert proposal == Proposal(chain([7, 8]), Source.DRAFT, proposal.drafting)
    assert drafting == Drafting(num_asked=2, num_received=2)


async def test_lookup_proposals_are_counted_among_all_and_apart_and_not_for_the_draft(measured):
    draft, metrics, tally = FakeDraft(), Metrics(), Tally()
    sequence, speculation = begun(draft, 3, 4, 5)
    for planned, accepted in ((plan(2, lookup=0), (0, 1)), (plan(2), (0,))):
        speculation.advance(sequence, planned)
        if len(planned.grants) == 1:
            draft.grow(sequence.base, chain([7, 8]))
        proposal = await speculation.next(sequence)
        verdict = Verdict(1, sequence.base, accepted, 9)
        sequence.extend(proposal.tree, verdict)
        record = RoundRecord.of(proposal, verdict, Exchange())
        sequence.statistics.count_round(record)
        metrics.round_ended(record, Split(), tally)
    statistics = sequence.statistics
    assert (statistics.num_draft_tokens, statistics.num_accepted_tokens) == (5, 3)
    assert (statistics.num_lookup_tokens, statistics.num_accepted_lookup_tokens) == (3, 2)
    assert (tally.num_draft_tokens, tally.num_accepted_tokens) == (2, 1)
    metrics.sample_ended(statistics)
    seen = total(measured)
    assert seen["specdec.lookup_tokens"] == {(): 3}
    assert seen["specdec.lookup_accepted_tokens"] == {(): 2}
    assert seen["specdec.draft_nodes_received"] == {(): 2}
    assert seen["specdec.draft_nodes_unused"] == {(): 0}


async def test_before_the_first_token_nothing_is_proposed():
    draft, sequence = FakeDraft(), new_sequence([1, 2, 3, 1, 2])
    speculation = Speculation(draft, lookup=FakeLookup(3, 1))
    speculation.advance(sequence, plan(2, lookup=1))
    assert (await speculation.next(sequence)).tree == EMPTY_TREE
    assert draft.num_advances == 1, "the draft's prefill begins beside the target's"
