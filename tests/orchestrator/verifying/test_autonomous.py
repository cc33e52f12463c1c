"""Where nothing is drafted the target goes on unasked: the same text, and a round trip for many tokens."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from typing import Any

import pytest

from orchestrator.control.controller import Fixed
from orchestrator.rounds import RoundPlan
from orchestrator.sequence import Sequence
from orchestrator.verifying.target_client import TargetClient
from specdec.core.rounds import Round
from specdec.core.tree import EMPTY_TREE, TokenTree
from target_service.engine import TargetEngine
from testing.misbehaving import Misbehaving
from testing.patience import PATIENCE_S
from testing.table_model import Table, TableVerifier
from tests.cluster import Cluster, cluster
from tests.models.fake_peers import new_sequence

TABLE = Table(vocab_size=40)


@pytest.fixture
def rounds(monkeypatch: pytest.MonkeyPatch) -> list[Round]:
    """Every round that a target is asked for in this process."""
    asked: list[Round] = []
    submit = TargetEngine.submit

    def counting(engine: TargetEngine, key: Any, round_: Round, arrived: float | None = None) -> None:
        if round_ not in asked:  # one that is put off comes once more
            asked.append(round_)
        submit(engine, key, round_, arrived)

    monkeypatch.setattr(TargetEngine, "submit", counting)
    return asked


async def text_of(running: Cluster, **fields: Any) -> list[int]:
    [sample] = await running.client.generate(token_ids={"token_ids": [1, 2, 3]}, seed=5, **fields)
    return list(sample.token_ids)


def client_of(running: Cluster) -> TargetClient:
    return TargetClient(running.orchestrator.targets, "", "", PATIENCE_S, time.monotonic())


async def decoded(client: TargetClient, sequence: Sequence, num_tokens: int) -> list[int]:
    """So many tokens more, one a round."""
    controller = Fixed(0)
    for _ in range(num_tokens):
        plan = controller.plan(sequence)
        sequence.extend(EMPTY_TREE, await client.verify(sequence, EMPTY_TREE, plan))
    return sequence.ids


async def test_a_target_that_goes_on_unasked_gives_the_same_text_for_few_rounds_and_no_pass_more(
    rounds: list[Round],
) -> None:
    verifier = Misbehaving(TableVerifier(TABLE))
    async with cluster([verifier]) as running:
        going_on = await text_of(running, max_tokens=200, num_draft_tokens=0)
        await running.settled()
    assert len(going_on) == 200
    assert verifier.num_passes == 200
    assert 1 + len(rounds) <= 20
    rounds.clear()
    old = Misbehaving(TableVerifier(TABLE))
    async with cluster([old]) as running:
        replica = running.orchestrator.targets.replicas[0]
        assert replica.info is not None
        replica.info = dataclasses.replace(replica.info, capabilities=())
        assert await text_of(running, max_tokens=200, num_draft_tokens=0) == going_on
    assert len(rounds) == 199, "an older target is asked for each token"


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 33, 34, 35, 66])
async def test_it_stops_where_the_request_ends(rounds: list[Round], max_tokens: int) -> None:
    verifier = Misbehaving(TableVerifier(TABLE))
    async with cluster([verifier]) as running:
        assert len(await text_of(running, max_tokens=max_tokens, num_draft_tokens=0)) == max_tokens
        await running.settled()
    assert verifier.num_passes == max_tokens


async def test_a_stop_token_ends_it() -> None:
    async with cluster([Misbehaving(TableVerifier(TABLE))]) as running:
        text = await text_of(running, max_tokens=60, num_draft_tokens=0)
        stop = next(token for token in text[10:] if token not in text[:10])
        until = text.index(stop)
        assert await text_of(running, max_tokens=60, num_draft_tokens=0, stop_token_ids=[stop]) == text[:until]
        await running.settled()


async def test_it_is_asked_again_before_it_rests(rounds: list[Round]) -> None:
    """A round that comes when the target rests costs it a pass where others are in every one."""
    sequence = new_sequence(max_tokens=400)
    async with asyncio.timeout(PATIENCE_S), cluster([TableVerifier(TABLE)]) as running, client_of(running) as client:
        await decoded(client, sequence, 120)
    assert all(not round_.tree for round_ in rounds)
    # The round that is sent in time is there before the last token that was allowed.
    for before, round_ in itertools.pairwise(rounds):
        assert round_.base <= before.base + before.num_autonomous


class OneByOne(TableVerifier):
    """Passes of which each is allowed by the test."""

    def __init__(self) -> None:
        super().__init__(TABLE)
        self.allowed = threading.Semaphore(0)

    def verify(self, jobs: Any) -> Any:
        self.allowed.acquire(timeout=PATIENCE_S)
        return super().verify(jobs)


async def test_it_is_not_asked_again_before_half_of_it_has_come(rounds: list[Round]) -> None:
    verifier, sequence, controller = OneByOne(), new_sequence(max_tokens=400), Fixed(0)
    async with asyncio.timeout(PATIENCE_S), cluster([verifier]) as running, client_of(running) as client:
        for _ in range(120):
            verifier.allowed.release()
            verdict = await client.verify(sequence, EMPTY_TREE, controller.plan(sequence))
            sequence.extend(EMPTY_TREE, verdict)
        verifier.allowed.release(1000)
    assert len(rounds) <= 120 / 16 + 1


async def test_a_round_that_is_long_on_its_way_is_not_superseded(rounds: list[Round]) -> None:
    sequence = new_sequence(max_tokens=400)
    async with asyncio.timeout(PATIENCE_S), cluster([TableVerifier(TABLE)]) as running, client_of(running) as client:
        verdict = await client.verify(sequence, EMPTY_TREE, RoundPlan(num_autonomous=32))
        sequence.extend(EMPTY_TREE, verdict)
        sequence.extend(EMPTY_TREE, await client.verify(sequence, EMPTY_TREE, RoundPlan(num_autonomous=32)))
        lane, withheld = client._lane, []
        assert lane is not None
        send = lane.send
        lane.send = lambda *said: withheld.append(said)  # type: ignore[method-assign]
        for _ in range(32):
            sequence.extend(EMPTY_TREE, await client.verify(sequence, EMPTY_TREE, RoundPlan(num_autonomous=32)))
        assert len(withheld) == 1
        last = asyncio.create_task(client.verify(sequence, EMPTY_TREE, RoundPlan()))
        await asyncio.sleep(0.05)
        lane.send = send  # type: ignore[method-assign]
        send(*withheld[0])
        sequence.extend(EMPTY_TREE, await last)
        assert len(withheld) == 1, "nothing is asked before that is answered"
        assert len(rounds) == 2
        assert sequence.statistics.num_replays == 0


async def test_a_target_that_goes_on_is_told_not_to_and_then_verifies_trees(rounds: list[Round]) -> None:
    sequence, undisturbed = new_sequence(max_tokens=100), new_sequence(max_tokens=100)
    async with cluster([TableVerifier(TABLE)]) as running, client_of(running) as client:
        text = await decoded(client, undisturbed, 60)
    rounds.clear()
    verifier = Misbehaving(TableVerifier(TABLE), closes_at=9)
    async with asyncio.timeout(PATIENCE_S), cluster([verifier]) as running, client_of(running) as client:
        for _ in range(8):
            verdict = await client.verify(sequence, EMPTY_TREE, RoundPlan(num_autonomous=30))
            sequence.extend(EMPTY_TREE, verdict)
        assert [round_.num_autonomous for round_ in rounds] == [30]
        to_come = verdict.num_autonomous_left
        assert to_come == 24
        # It is in a pass; what it is told before that ends is heeded in the next one.
        telling = asyncio.create_task(client.verify(sequence, EMPTY_TREE, RoundPlan()))
        while not running.targets[0].servicer.streams._loop._inbox.qsize():
            await asyncio.sleep(0.01)
        verifier.gate.set()
        num_to_come = []
        verdict = await telling
        while True:
            sequence.extend(EMPTY_TREE, verdict)
            num_to_come.append(verdict.num_autonomous_left)
            if not verdict.num_autonomous_left:
                break
            verdict = await client.verify(sequence, EMPTY_TREE, RoundPlan())
        assert num_to_come == [1, 0], "which is OVERRUN"
        assert len(rounds) == 2
        right = TokenTree.chain(text[sequence.base : sequence.base + 4])
        verdict = await client.verify(sequence, right)
        assert verdict.accepted == (0, 1, 2, 3)
        sequence.extend(right, verdict)
        assert text[: sequence.base] == sequence.ids


async def test_a_replica_that_is_lost_while_it_goes_on_is_replaced_and_the_request_is_suspected() -> None:
    verifiers = [Misbehaving(TableVerifier(TABLE), closes_at=20) for _ in range(2)]
    sequence = new_sequence(max_tokens=60)
    async with asyncio.timeout(PATIENCE_S), cluster(verifiers) as running, client_of(running) as client:
        decoding = asyncio.create_task(decoded(client, sequence, 60))
        used = None
        while used is None:
            used = next((index for index, each in enumerate(verifiers) if each.entered.is_set()), None)
            await asyncio.sleep(0.01)
        verifiers[1 - used].closes_at = None
        lane = client._lane
        assert lane is not None
        stopping = asyncio.create_task(running.targets[used].stop())
        while not lane.lost:
            await asyncio.sleep(0.01)
        verifiers[used].gate.set()
        await decoding
        await stopping
        assert sequence.statistics.num_replays == 1
        assert len(client._losses) == 1
    undisturbed = new_sequence(max_tokens=60)
    async with cluster([TableVerifier(TABLE)]) as running, client_of(running) as client:
        assert await decoded(client, undisturbed, 60) == sequence.ids


async def test_a_parked_sequence_goes_on_elsewhere() -> None:
    sequence, undisturbed = new_sequence(max_tokens=60), new_sequence(max_tokens=60)
    async with asyncio.timeout(PATIENCE_S), cluster([TableVerifier(TABLE)]) as running, client_of(running) as client:
        await decoded(client, sequence, 25)
        client.park()
        await running.settled()
        await decoded(client, sequence, 35)
        async with client_of(running) as another:
            assert await decoded(another, undisturbed, 60) == sequence.ids


@pytest.mark.slow
async def test_the_service_is_heard_while_it_goes_on() -> None:
    """Longer passes than the silence after which a replica counts as lost."""
    verifier = Misbehaving(TableVerifier(TABLE), closes_at=10)
    sequence = new_sequence(max_tokens=20)
    async with (
        asyncio.timeout(PATIENCE_S),
        cluster([verifier], watchdog_s=2.0) as running,
        client_of(running) as client,
    ):
        decoding = asyncio.create_task(decoded(client, sequence, 20))
        await verifier.in_a_pass()
        await asyncio.sleep(3.0)
        verifier.gate.set()
        await decoding
    assert sequence.statistics.num_replays == 0
