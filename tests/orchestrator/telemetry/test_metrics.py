"""Replays by reason, waste and requests: what is counted when something goes wrong."""

from __future__ import annotations

import asyncio

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from orchestrator.api.api_keys import Account
from orchestrator.drafting.speculation import Speculation
from orchestrator.rounds import Grant, RoundPlan, Source
from orchestrator.statistics import Statistics
from orchestrator.telemetry import metrics as orchestrator_metrics
from orchestrator.telemetry.metrics import Metrics, RequestClock
from specdec.core.errors import Preempted
from specdec.core.rounds import GrowthEnd, Verdict
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.v1 import generation_pb2
from target_service.language_model import LmVerifier
from testing.misbehaving import Misbehaving
from testing.table_model import Table, TableVerifier
from tests.cluster import cluster
from tests.instruments import total
from tests.models.fake_peers import FakeDraft, new_sequence
from tests.models.table_runner import TableRunner

LENGTH = 60
REQUEST = dict(token_ids={"token_ids": [1, 2, 3, 1, 2, 3, 7, 7]}, max_tokens=LENGTH, seed=7)


async def test_a_target_that_drains_is_counted_with_its_reason_and_the_tokens_fed_again(measured):
    verifiers = [LmVerifier(TableRunner(seed=1)) for _ in range(2)]
    async with cluster(verifiers, num_draft_tokens=0) as deployment:
        sample = None
        async for response in deployment.client.stream(**REQUEST):
            if response.HasField("chunk") and sample is None:
                sample = response.chunk
                [busy] = [server for server in deployment.targets if server.load.live_sequences]
                await busy.stop(grace_s=5.0)
            if response.chunk.HasField("finish"):
                finish = response.chunk.finish
        assert finish.speculation.num_replays == 1
        counted = total(measured)
    replays = {labels[0][1]: count for labels, count in counted["specdec.replays"].items() if count}
    assert replays == {"DRAINING": 1}
    [tokens] = [count for count in counted["specdec.replayed_tokens"].values() if count]
    assert 8 < tokens < 8 + LENGTH, "the prompt and what had been committed"


@pytest.mark.slow
async def test_a_target_that_stands_still_is_counted_as_the_watchdogs_and_so_is_its_replay(measured):
    verifiers = [Misbehaving(TableVerifier(Table()), closes_at=10) for _ in range(2)]
    async with cluster(verifiers, watchdog_s=8.0, stuck_after_s=0.3) as deployment:
        request = asyncio.create_task(deployment.client.generate(**REQUEST))
        while not (wedged := [each for each in verifiers if each.entered.is_set()]):
            await asyncio.sleep(0.01)
        for each in verifiers:
            each.closes_at = None
        await request
        counted = total(measured)
        wedged[0].gate.set()
    losses = {dict(labels)["reason"]: n for labels, n in counted["specdec.replica_losses"].items() if n}
    assert losses == {"WATCHDOG_FIRED": 1}
    replays = {dict(labels)["reason"]: n for labels, n in counted["specdec.replays"].items() if n}
    assert replays == {"WATCHDOG_FIRED": 1}


async def test_a_sequence_that_is_preempted_is_counted_with_that_reason(measured):
    verifier = Misbehaving(TableVerifier(Table()), closes_at=5)
    async with cluster([verifier]) as deployment:
        requests = [deployment.client.generate(**REQUEST | {"seed": seed}) for seed in range(2)]
        tasks = [asyncio.create_task(request) for request in requests]
        await verifier.in_a_pass()
        verifier.script((), Preempted("planted"))
        verifier.gate.set()
        await asyncio.gather(*tasks)
        counted = total(measured)
    replays = {dict(labels)["reason"]: n for labels, n in counted["specdec.replays"].items() if n}
    assert replays == {"PREEMPTED": 1}


async def test_a_parked_sequence_is_counted_and_so_is_its_replay(measured):
    async with cluster([TableVerifier(Table())], park_after_s=0.1) as deployment:
        responses = deployment.orchestrator._servicer._responses(
            generation_pb2.GenerateRequest(**REQUEST | {"max_tokens": 200}), "r", Account(None)
        )
        async for response in responses:
            if response.HasField("chunk"):
                break
        while not total(measured)["specdec.parked"][()]:
            await asyncio.sleep(0.02)
        async for _ in responses:
            pass
        counted = total(measured)
    assert counted["specdec.parked"] == {(): 1}
    replays = {dict(labels)["reason"]: n for labels, n in counted["specdec.replays"].items() if n}
    assert replays == {"PARKED": 1}


async def test_the_time_of_a_client_that_reads_no_reports_of_rounds_is_the_clients(measured):
    request = REQUEST | {"max_tokens": 200, "return_rounds": True, "num_draft_tokens": 0}
    async with cluster([TableVerifier(Table())]) as deployment:
        responses = deployment.orchestrator._servicer._responses(
            generation_pb2.GenerateRequest(**request), "r", Account(None)
        )
        async for response in responses:
            if response.HasField("chunk"):
                break
        await asyncio.sleep(0.5)
        async for _ in responses:
            pass
        parts = {dict(labels)["part"]: seconds for labels, seconds in total(measured)["specdec.round_time"].items()}
    assert parts["client"] > 0.4
    assert parts["orchestrator"] < 0.4


def test_what_came_and_was_never_verified_is_waste(measured):
    counted = Metrics()
    counted.sample_ended(Statistics(num_received_nodes=12, num_draft_tokens=9))
    counted.sample_ended(Statistics(num_received_nodes=4, num_draft_tokens=4, replays=[("PREEMPTED", 30)]))
    seen = total(measured)
    assert seen["specdec.draft_nodes_received"] == {(): 16}
    assert seen["specdec.draft_nodes_unused"] == {(): 3}
    assert seen["specdec.replayed_tokens"][(("reason", "PREEMPTED"),)] == 30


async def test_a_node_is_received_once_however_often_its_tree_is_pushed():
    draft = FakeDraft()
    sequence, speculation = new_sequence(), Speculation(draft)
    sequence.extend(EMPTY_TREE, Verdict(0, sequence.base, (), 5))
    speculation.advance(sequence, RoundPlan((Grant(Source.DRAFT, 4, waits=True),)))
    for tree in (TokenTree.chain([6]), TokenTree.chain([6, 7]), TokenTree.chain([6, 7]), TokenTree.chain([6, 7, 8, 9])):
        draft.grow(3, tree, end=None)
    assert (await speculation.next(sequence)).drafting.num_received == 4
    sequence.extend(EMPTY_TREE, Verdict(1, sequence.base, (), 1))
    speculation.advance(sequence, RoundPlan((Grant(Source.DRAFT, 4, waits=True),)))
    draft.grow(3, TokenTree.chain([6, 7, 8]), advance=1)
    draft.grow(4, TokenTree.chain([2]), end=GrowthEnd.UNLIKELY)
    assert (await speculation.next(sequence)).drafting.num_received == 3 + 1, (
        "what was decided otherwise meanwhile came, too"
    )


async def test_an_address_that_cannot_be_resolved_is_told_as_not_ready(measured):
    async with cluster([TableVerifier(Table())]) as deployment:
        orchestrator = deployment.orchestrator
        orchestrator.drafts.unresolved["nowhere.invalid:50052"] = "the name cannot be resolved"
        ready = total(measured)["specdec.replica_ready"]
        [target] = [replica.address for replica in orchestrator.targets.replicas]
        assert ready == {
            (("address", target), ("role", "target")): 1,
            (("address", "nowhere.invalid:50052"), ("role", "draft")): 0,
        }
        del orchestrator.drafts.unresolved["nowhere.invalid:50052"]
        assert list(total(measured)["specdec.replica_ready"]) == [(("address", target), ("role", "target"))]


async def test_a_pair_that_disagrees_is_seen_in_what_is_accepted(measured):
    pair = [LmVerifier(TableRunner(seed=1))], [LanguageModelDrafter(TableRunner(seed=2))]
    async with cluster(*pair) as deployment:
        [sample] = await deployment.client.generate(**REQUEST, num_draft_tokens=4)
        counted = total(measured)
    told = sample.finish.speculation
    [verified] = counted["specdec.draft_tokens"].values()
    [accepted] = counted["specdec.draft_accepted_tokens"].values()
    assert (verified, accepted) == (told.num_draft_tokens, told.num_accepted_tokens)


def test_a_requests_tokens_are_timed_per_sample(monkeypatch):
    now = [50.0]
    monkeypatch.setattr(orchestrator_metrics.time, "monotonic", lambda: now[0])
    clock = RequestClock()
    assert (clock.first_s, clock.per_token_s) == (None, None)
    for at, index, num_tokens in [(51, 0, 1), (51, 1, 1), (52, 0, 0), (53, 0, 2), (55, 1, 2)]:
        now[0] = at
        clock.wrote(index, num_tokens)
    now[0] = 60.0
    assert clock.first_s == 1.0
    assert clock.per_token_s == pytest.approx(4 * 2 / 4), "two samples side by side gave two more tokens each in 4 s"
    assert clock.duration_s == 10.0
