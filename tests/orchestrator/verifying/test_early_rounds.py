"""The round after is sent while the target is in a pass: what the orchestrator makes of it, and of its loss."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from orchestrator.rounds import RoundPlan
from orchestrator.sequence import Sequence
from orchestrator.verifying.target_client import TargetClient
from specdec.core.rounds import Verdict
from specdec.core.tree import EMPTY_TREE, TokenTree
from testing.misbehaving import Misbehaving
from testing.patience import PATIENCE_S
from testing.table_model import Table, TableVerifier
from tests.cluster import Cluster, cluster
from tests.models.fake_peers import new_sequence

TABLE = Table(vocab_size=40)
chain = TokenTree.chain


def text_of(sequence: Sequence, count: int) -> list[int]:
    """What comes next."""
    ids = list(sequence.ids)
    for _ in range(count):
        ids.append(TABLE.next_token(sequence.spec, ids, len(ids)))
    return ids[sequence.base :]


@asynccontextmanager
async def begun() -> AsyncIterator[tuple[Cluster, Misbehaving, TargetClient, Sequence]]:
    """After the first token; the next pass waits for the gate."""
    verifier, sequence = Misbehaving(TableVerifier(TABLE), closes_at=2), new_sequence(max_tokens=100)
    async with asyncio.timeout(PATIENCE_S), cluster([verifier]) as running:
        client = TargetClient(running.orchestrator.targets, "", "", PATIENCE_S, time.monotonic())
        async with client:
            sequence.extend(EMPTY_TREE, await client.verify(sequence, EMPTY_TREE))
            yield running, verifier, client, sequence


async def verified(
    verifier: Misbehaving, client: TargetClient, sequence: Sequence, tree: TokenTree, sent: TokenTree
) -> Verdict:
    """The verdict of a pass, with which the round after has come: how long a pass takes is not known yet."""
    client._next_round = lambda _: (sent, 4)
    task = asyncio.create_task(client.verify(sequence, tree, RoundPlan(next_round_after_s=0.0)))
    await verifier.in_a_pass()
    verifier.gate.set()
    verdict = await task
    sequence.extend(tree, verdict)
    return verdict


async def test_the_next_verdict_is_on_what_is_left_of_its_tree() -> None:
    async with begun() as (_, verifier, client, sequence):
        text = text_of(sequence, 12)
        long = chain([(text[0] + 1) % 40]).merge(chain(text[:9]))  # and one that is wrong before them
        verdict = await verified(verifier, client, sequence, chain(text[:2]), long)
        left = chain(text[3:7])
        assert (verdict.accepted, verdict.dropped_round, verdict.num_autonomous_left) == ((0, 1), 0, 0)
        verdict = await client.verify(sequence, left)
        assert (verdict.round, verdict.accepted) == (2, (0, 1, 2, 3))
        assert client.exchange.pipelined
        sequence.extend(left, verdict)
        assert list(sequence.ids[-8:]) == text[:8]
        assert (await client.verify(sequence, EMPTY_TREE)).round == 3
        assert verifier.num_passes == 4


async def test_a_round_that_was_dropped_never_was() -> None:
    async with begun() as (_, verifier, client, sequence):
        text = text_of(sequence, 6)
        wrong = chain([text[0], (text[1] + 1) % 40, 0])
        verdict = await verified(verifier, client, sequence, chain(text[:1]), wrong)
        assert verdict.dropped_round
        verdict = await client.verify(sequence, chain(text[2:4]))
        assert (verdict.round, verdict.accepted) == (2, (0, 1))
        assert sequence.statistics.num_replays == 0


async def test_a_target_that_is_lost_with_it_is_replaced() -> None:
    verifiers = [Misbehaving(TableVerifier(TABLE), closes_at=3), Misbehaving(TableVerifier(TABLE), closes_at=3)]
    sequence = new_sequence(max_tokens=100)
    async with asyncio.timeout(PATIENCE_S), cluster(verifiers) as running:
        client = TargetClient(running.orchestrator.targets, "", "", PATIENCE_S, time.monotonic())
        async with client:
            sequence.extend(EMPTY_TREE, await client.verify(sequence, EMPTY_TREE))
            text = text_of(sequence, 9)
            client._next_round = lambda _: (chain(text[:6]), 4)
            verdict = await client.verify(sequence, EMPTY_TREE, RoundPlan(next_round_after_s=0.0))
            sequence.extend(EMPTY_TREE, verdict)
            left = chain(text[1:5])
            used = 0 if verifiers[0].num_passes else 1
            lane = client._lane
            assert lane is not None
            task = asyncio.create_task(client.verify(sequence, left))
            await verifiers[used].in_a_pass()
            stopping = asyncio.create_task(running.targets[used].stop())
            while not lane.lost:
                await asyncio.sleep(0.001)
            verifiers[used].gate.set()
            again = await task
            sequence.extend(left, again)
            assert (again.round, again.accepted) == (0, ())
            assert list(sequence.ids[-2:]) == text[:2]
            assert sequence.statistics.num_replays == 1
            await stopping


async def test_a_target_that_does_not_take_it_is_never_sent_one() -> None:
    async with begun() as (running, verifier, client, sequence):
        replica = running.orchestrator.targets.replicas[0]
        assert replica.info is not None
        replica.info = dataclasses.replace(replica.info, capabilities=())
        verifier.closes_at = None

        def next_round(_: Sequence) -> Any:
            raise AssertionError("it is not asked for")

        client._next_round = next_round
        assert (await client.verify(sequence, EMPTY_TREE, RoundPlan(next_round_after_s=0.0))).round == 1


async def test_nothing_to_send_is_nothing_sent() -> None:
    async with begun() as (_, verifier, client, sequence):
        asked = asyncio.Event()

        def next_round(_: Sequence) -> tuple[TokenTree, int]:
            asked.set()
            return EMPTY_TREE, 0

        client._next_round = next_round
        task = asyncio.create_task(client.verify(sequence, EMPTY_TREE, RoundPlan(next_round_after_s=0.0)))
        await asked.wait()
        await verifier.in_a_pass()
        verifier.gate.set()
        assert not (await task).dropped_round
        assert not client._rounds.pending
