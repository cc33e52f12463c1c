"""What a client is told of its rounds adds up, and says who was waited for."""

from __future__ import annotations

import pytest

from orchestrator.api.responses import write_event
from orchestrator.drafting.speculation import Speculation
from orchestrator.outbox import Chunk
from orchestrator.rounds import Drafting, Exchange, Grant, Proposal, RoundPlan, RoundRecord, Source
from orchestrator.statistics import Statistics
from orchestrator.text import Piece
from specdec.core.rounds import Growth, GrowthEnd, Timings, Verdict
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.v1 import generation_pb2
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.cluster import cluster
from tests.models.fake_peers import FakeDraft, new_sequence

chain = TokenTree.chain
TWO = (Grant(Source.DRAFT, 2, waits=True),)


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def record(
    number: int,
    tree: TokenTree = EMPTY_TREE,
    accepted: tuple[int, ...] = (),
    drafting: Drafting | None = None,
    **timings: int,
) -> RoundRecord:
    return RoundRecord(
        number, 3, tree, Source.DRAFT, accepted, drafting=drafting or Drafting(), timings=Timings(**timings)
    )


def test_counts_by_depth_add_up():
    statistics = Statistics()
    for tree, number, accepted in (
        (chain([5, 6]), 0, ()),  # opened anew: nothing of it was verified
        (chain([5, 6, 7]), 1, (0, 1)),
        (TokenTree((5, 6, 7), (-1, -1, 1)), 2, (1, 2)),
        (chain([5]), 3, ()),
        (EMPTY_TREE, 4, ()),
    ):
        statistics.count_round(record(number, tree, accepted))
    assert statistics.num_rounds == 5
    assert statistics.num_drafts == 3
    assert statistics.num_draft_tokens == 7
    assert statistics.num_accepted_tokens == 4
    assert statistics.num_accepted_tokens_per_pos == [2, 2, 0]


def test_outcomes_are_told_apart_and_only_those_that_something_came_after_are_counted():
    statistics = Statistics()
    hit = False
    for accepted, foreseen in (((0, 1, 2), True), ((0, 1, 2), False), ((), True), ((0, 1), True), ((0, 1), False)):
        statistics.count_round(record(1, chain([5, 6, 7]), accepted, Drafting(hit=hit)))
        hit = foreseen
    statistics.count_round(record(2, drafting=Drafting(hit=hit)))
    # Before it nothing was verified, so nothing was foreseen. And it is the last of all.
    statistics.count_round(record(3, chain([5]), (0,), Drafting(hit=True)))
    assert (statistics.num_bonuses, statistics.num_bonus_hits) == (2, 1)
    assert statistics.num_corrections_per_pos == [1, 0, 2]
    assert statistics.num_correction_hits_per_pos == [1, 0, 1]
    assert statistics.num_drafts == 6


def test_the_time_of_the_rounds_begins_with_the_first_verdict_and_prefills_are_not_in_its_parts():
    clock = Clock()
    statistics = Statistics(clock=clock)
    # Waited for before the first verdict of all: a resumed text.
    statistics.count_round(record(0, drafting=Drafting(waited_s=7.0), queue_us=1, pass_us=900_000, sample_us=5))
    for _ in range(2):
        clock.now += 1.25
        drafting = Drafting(waited_s=0.25)
        statistics.count_round(record(1, chain([5]), (), drafting, queue_us=10, pass_us=500_000, sample_us=20))
    assert statistics.elapsed_us == 2_500_000
    assert statistics.draft_wait_us == 500_000
    parts = (statistics.target_queue_us, statistics.target_pass_us, statistics.target_sample_us)
    assert parts == (20, 1_000_000, 40)


def test_a_draft_is_on_time_where_the_round_did_not_wait():
    statistics = Statistics()
    for waited_s in (0.0, None, None):
        statistics.count_round(record(1, chain([5]), (0,), Drafting(waited_s=waited_s)))
    statistics.count_round(record(2))
    assert (statistics.num_drafts, statistics.num_drafts_on_time) == (3, 2)


async def test_a_hit_needs_no_wait_and_nodes_are_counted_once():
    draft = FakeDraft()
    sequence, speculation = new_sequence(), Speculation(draft, max_ahead=8)
    statistics = sequence.statistics

    async def proposed(grants: tuple[Grant, ...], base: int = 0, grown: TokenTree = EMPTY_TREE) -> Proposal:
        speculation.advance(sequence, RoundPlan(grants))
        if grown:
            draft.grow(base, grown)
        return await speculation.next(sequence)

    def decided(proposal: Proposal, verdict: Verdict) -> None:
        sequence.extend(proposal.tree, verdict)
        statistics.count_round(RoundRecord.of(proposal, verdict, Exchange()))

    decided(await proposed(()), Verdict(0, 2, (), 5))
    # What was asked for, then the same once more with a correction, and with what follows the bonus.
    proposal = await proposed(TWO, 3, chain([6, 7]))
    ahead = TokenTree((6, 7, 8, 1, 4), (-1, 0, 1, -1, 3))
    draft.pushed = [Growth(1, 3, (), ahead, None)]
    decided(proposal, Verdict(1, 3, (), 1))
    proposal = await proposed(TWO)
    assert proposal.tree == chain([4])
    path, late = ahead.merge(chain([6, 7, 8, 9, 9])).since(len(ahead))
    draft.pushed = [Growth(1, 3, path, late, GrowthEnd.SUPERSEDED), Growth(2, 4, (), chain([4, 3]), None)]
    decided(proposal, Verdict(2, 4, (0,), 2))
    decided(await proposed(TWO, sequence.base, chain([1, 1])), Verdict(3, sequence.base, (), 7))
    assert statistics.num_received_nodes == 2 + 3 + 2 + 1 + 2, "late ones count, what was there does not"
    assert statistics.num_draft_tokens == 5
    assert (statistics.num_drafts, statistics.num_drafts_on_time) == (3, 1)
    assert statistics.num_corrections_per_pos == statistics.num_correction_hits_per_pos == [1]
    assert (statistics.num_bonuses, statistics.num_bonus_hits) == (1, 0), "3 is not what followed"


@pytest.mark.parametrize("num_draft_tokens", [0, 4])
async def test_clients_are_told_and_it_adds_up(num_draft_tokens):
    table = Table(vocab_size=64)
    verifier, drafter = TableVerifier(table, pass_s=0.004), TableDrafter(table, step_s=0.0005)
    async with cluster([verifier], [drafter], num_ahead_tokens=40) as running:
        [sample] = await running.client.generate(
            token_ids={"token_ids": [1]}, max_tokens=120, temperature=1.0, num_draft_tokens=num_draft_tokens
        )
    told = sample.finish.speculation
    decided = told.num_bonuses + sum(told.num_corrections_per_pos)
    foreseen = told.num_bonus_hits + sum(told.num_correction_hits_per_pos)
    speculated = num_draft_tokens > 0
    assert told.num_drafts - 1 <= decided <= told.num_drafts
    assert (foreseen > 0) is (told.num_drafts_on_time > 0) is (told.draft_wait_us > 0) is speculated
    assert foreseen <= decided
    assert (told.num_received_nodes > told.num_draft_tokens) is speculated
    assert told.target_pass_us > 0
    parts = told.draft_wait_us + told.target_queue_us + told.target_pass_us + told.target_sample_us
    assert 0 < parts <= told.elapsed_us


def test_every_field_of_the_contract_is_told():
    sequence = new_sequence(max_tokens=1)
    sequence.extend(EMPTY_TREE, Verdict(0, 2, (), 5))
    expected = {}
    for number, field in enumerate(generation_pb2.SpeculationStats.DESCRIPTOR.fields, 1):
        expected[field.name] = [number] if field.is_repeated else number
        setattr(sequence.statistics, field.name, expected[field.name])
    told = write_event(Chunk.of(sequence, index=0, position=0, piece=Piece()), None).chunk.finish.speculation
    assert {name: getattr(told, name) for name in expected} == expected
