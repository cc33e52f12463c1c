"""A guess of the prompt lookup in place of the draft's tree: who is asked for what, and what is told of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.decoder import Step
from orchestrator.drafting.speculation import Speculation
from orchestrator.replicas.replica import Tally
from orchestrator.rounds import Guess, Proposal, Rival, RoundPlan
from orchestrator.sequence import Sequence
from orchestrator.telemetry.metrics import Metrics
from orchestrator.telemetry.round_clock import Split
from orchestrator.text import Piece
from specdec.core.rounds import Budget, Growth, Verdict
from specdec.core.tree import EMPTY_TREE, TokenTree
from tests.instruments import total
from tests.models.fake_peers import FakeDraft, commit, new_sequence

chain = TokenTree.chain
BUDGET = Budget(2, 2)


def planned(guess: list[int], beats: Rival, in_doubt: bool = True) -> RoundPlan:
    return RoundPlan(BUDGET, 0, Guess(chain(guess), beats, in_doubt))


def begun(draft: FakeDraft, **options: int) -> tuple[Sequence, Speculation]:
    """The base is 12."""
    sequence = new_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9, 1], max_tokens=40)
    speculation = Speculation(draft, **options)
    speculation.advance(sequence, RoundPlan(Budget()))
    commit(sequence, 2)
    return sequence, speculation


@pytest.mark.parametrize("max_ahead", [0, 20])
async def test_a_guess_that_is_better_than_waiting_goes_at_once(max_ahead):
    draft = FakeDraft()
    sequence, speculation = begun(draft, max_ahead=max_ahead)
    speculation.advance(sequence, planned([3, 4, 5], Rival.WAIT))
    assert (await speculation.next(sequence)).tree == chain([3, 4, 5])
    assert not any(budget.max_nodes for budget in draft.budgets), "nobody waits for the draft, so nothing is asked for"


async def test_without_growing_ahead_the_draft_only_hears_what_was_committed():
    draft = FakeDraft()
    sequence, speculation = begun(draft)
    before = draft.num_caught_up
    speculation.advance(sequence, planned([3, 4, 5], Rival.WAIT))
    assert (draft.num_advances, draft.num_caught_up) == (0, before + 1)


async def test_a_draft_that_grows_ahead_hears_of_a_guess_in_doubt_and_what_it_grows_there_is_next():
    draft = FakeDraft()
    sequence, speculation = begun(draft, max_ahead=20)
    speculation.advance(sequence, planned([3, 4, 5], Rival.WAIT))
    assert (draft.budgets, draft.in_flight) == ([Budget(0, 6, 20)], [chain([3, 4, 5])])
    assert (await speculation.next(sequence)).tree == chain([3, 4, 5])
    pushed = chain([3, 4, 5, 7]).merge(chain([3, 8, 1, 2]))
    draft.pushed = [Growth(1, sequence.base, (), pushed, None)]
    commit(sequence, 3, 8)
    speculation.advance(sequence, RoundPlan(BUDGET))
    proposal = await speculation.next(sequence)
    assert proposal.tree == chain([1, 2])
    assert not draft.ejected_for
    assert proposal.num_received == 4, "what was guessed is not the draft's"


async def test_a_draft_is_not_asked_to_grow_around_a_guess_that_is_hardly_in_doubt():
    draft = FakeDraft()
    sequence, speculation = begun(draft, max_ahead=20)
    caught_up = draft.num_caught_up
    speculation.advance(sequence, planned([3, 4], Rival.TREE, in_doubt=False))
    assert (draft.num_advances, draft.num_caught_up) == (0, caught_up + 1)
    assert (await speculation.next(sequence)).tree == chain([3, 4])


@pytest.mark.parametrize(("beats", "verified"), [(Rival.WAIT, [7, 8]), (Rival.TREE, [4, 5, 6])])
async def test_a_tree_that_is_there_is_preferred_unless_the_guess_is_better(beats, verified):
    draft = FakeDraft()
    sequence, speculation = begun(draft, max_ahead=20)
    speculation.advance(sequence, RoundPlan(BUDGET))
    draft.grow(sequence.base, chain([8, 9]), end=None)
    await speculation.next(sequence)
    draft.pushed = [Growth(1, sequence.base, (), chain([3, 7, 8]), None)]
    commit(sequence, 3)
    speculation.advance(sequence, planned([4, 5, 6], beats))
    assert list((await speculation.next(sequence)).tree.token_ids) == verified


@pytest.mark.parametrize("lost", ["not there", "late"])
async def test_where_the_draft_gives_nothing_there_is_the_guess(lost):
    draft = FakeDraft()
    draft.there = lost != "not there"
    sequence, speculation = begun(draft)
    speculation.advance(sequence, planned([3, 4, 5], Rival.NOTHING))
    assert draft.budgets[-1].max_nodes == 2, "the draft comes first"
    if draft.there:
        draft.script.append(None)
    proposal = await speculation.next(sequence)
    assert (proposal.tree, proposal.guessed) == (chain([3, 4, 5]), Rival.NOTHING)


async def test_what_the_draft_gives_is_verified_where_the_guess_is_second_best():
    draft = FakeDraft()
    sequence, speculation = begun(draft)
    speculation.advance(sequence, planned([3, 4, 5], Rival.NOTHING))
    draft.grow(sequence.base, chain([7, 8]))
    proposal = replace(await speculation.next(sequence), waited_s=None)
    assert proposal == Proposal(chain([7, 8]), foreseen=False, num_received=2)


async def test_guesses_are_counted_among_all_and_apart_and_not_for_the_draft(measured):
    draft, metrics, tally = FakeDraft(), Metrics(), Tally()
    sequence, speculation = begun(draft)
    for plan, accepted in ((planned([3, 4, 5], Rival.WAIT), (0, 1)), (RoundPlan(BUDGET), (0,))):
        speculation.advance(sequence, plan)
        if not plan.guess.tree:
            draft.grow(sequence.base, chain([7, 8]))
        proposal = await speculation.next(sequence)
        verdict = Verdict(1, sequence.base, accepted, 9)
        sequence.extend(proposal.tree, verdict)
        sequence.statistics.observe(proposal, verdict)
        metrics.round_ended(Step(proposal, verdict, Piece()), Split(), tally)
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


async def test_before_the_first_token_nothing_is_guessed():
    draft, sequence = FakeDraft(), new_sequence([1, 2, 3, 1, 2])
    speculation = Speculation(draft)
    speculation.advance(sequence, planned([3, 1], Rival.NOTHING))
    assert (await speculation.next(sequence)).tree == EMPTY_TREE
    assert draft.num_advances == 1, "the draft's prefill begins beside the target's"
