"""What the fault table found, in small: each of these once failed."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from specdec.client import Client, Sample
from specdec.core.errors import GivenUp, NoReplica, PassFailed
from testing.fault_proxy import FaultProxy
from testing.misbehaving import Misbehaving
from testing.patience import eventually
from testing.raw import orchestrator, target
from testing.table_model import Poison, Table, TableDrafter, TableVerifier
from testing.traffic import Asked
from tests.cluster import Cluster, cluster, connected, live

PROMPT = {"token_ids": [1, 2, 3]}
POISON = {"token_ids": [1, 1000]}


def verifier(**arguments: Any) -> TableVerifier:
    return TableVerifier(Table(), pass_s=0.005, **arguments)


def assert_same(sample: Sample, max_tokens: int, seed: int, temperature: float = 1.0) -> None:
    """Every token is the table's own."""
    asked = Asked(tuple(PROMPT["token_ids"]), max_tokens, seed, temperature)
    assert sample.token_ids == asked.expected(Table())


async def test_all_requests_of_a_client_survive_the_loss_of_its_first_orchestrator():
    """They once pushed each other back to the dead address."""
    async with (
        cluster([verifier()], [TableDrafter(Table())]) as found,
        orchestrator([found.targets[0].port]) as (second, _),
    ):
        addresses = [f"127.0.0.1:{server.port}" for server in (found.orchestrator, second)]
        async with Client(*addresses) as client:
            requests = [client.generate(token_ids=PROMPT, max_tokens=80, seed=seed) for seed in range(8)]
            tasks = [asyncio.create_task(request) for request in requests]
            await live(found.orchestrator, 8)
            await found.orchestrator.stop()
            for seed, [sample] in enumerate(await asyncio.gather(*tasks)):
                assert_same(sample, 80, seed)


async def test_connections_that_break_are_no_crashes():
    """A request once ended as poison after two resets, when its target lived all along."""
    async with (
        target(verifier()) as service,
        FaultProxy(service.server.port) as proxy,
        orchestrator([proxy.port]) as (server, client),
    ):
        await connected(server)
        task = asyncio.create_task(client.generate(token_ids=PROMPT, max_tokens=80, seed=1))
        num_resets = 0
        while not task.done():
            proxy.reset()
            num_resets += 1
            await asyncio.sleep(0.1)
        [sample] = await task
        assert_same(sample, 80, seed=1)
        assert num_resets > 3


async def test_a_refused_open_is_no_replay():
    """Waiting for KV slots once counted as one move after the other."""
    async with cluster([verifier(num_slots=600)]) as found:
        prompt = {"token_ids": list(range(400))}
        requests = [found.client.generate(token_ids=prompt, max_tokens=20, seed=seed) for seed in range(3)]
        for [sample] in await asyncio.gather(*requests):
            assert sample.finish.speculation.num_replays == 0


async def poisoned(found: Cluster) -> list[int]:
    """A poisonous request is given up, and four beside it get their own texts; how often these were replayed."""
    good = [found.client.generate(token_ids=PROMPT, max_tokens=60, temperature=0.0, seed=seed) for seed in range(4)]
    tasks = [asyncio.create_task(request) for request in good]
    await live(found.orchestrator, 4)
    with pytest.raises(GivenUp, match="replicas failed 4 times under this request"):
        await found.client.generate(token_ids=POISON, max_tokens=5)
    samples = [sample for [sample] in await asyncio.gather(*tasks)]
    for seed, sample in enumerate(samples):
        assert_same(sample, 60, seed, temperature=0.0)
    await found.settled()
    return [sample.finish.speculation.num_replays for sample in samples]


async def test_one_poisonous_request_ends_alone():
    """Those beside it in two passes that failed once ended with it."""
    async with cluster([verifier(poison=Poison(fail_on_token=1000)) for _ in range(3)]) as found:
        await poisoned(found)


async def test_a_request_without_numbers_is_given_up_and_none_beside_it_is_replayed():
    verifiers = [Misbehaving(verifier()) for _ in range(2)]
    for each in verifiers:  # as target_service.language_model says of NaN
        each.script(POISON["token_ids"], *[PassFailed("the model computes NaN")] * 9)
    async with cluster(verifiers) as found:
        assert await poisoned(found) == [0] * 4


@pytest.mark.slow
async def test_a_target_that_lives_but_makes_no_pass_is_left():
    """Its event loop goes on to say that it lives."""
    wedged = Misbehaving(verifier(), closes_at=10)
    async with cluster([wedged, verifier()], watchdog_s=8.0, stuck_after_s=0.3) as found:
        requests = [found.client.generate(token_ids=PROMPT, max_tokens=60, seed=seed) for seed in range(2)]
        samples = await asyncio.gather(*requests)
        wedged.gate.set()
        for seed, [sample] in enumerate(samples):
            assert_same(sample, 60, seed)
        assert max(sample.finish.speculation.num_replays for [sample] in samples) == 1
        # It is connected again in a moment, and idle; but it must not attract all sequences at once.
        left, other = found.orchestrator.targets.replicas
        await eventually(lambda: left.ready)
        left.lane()
        lanes = [other.lane() for _ in range(8)]
        assert {found.orchestrator.targets.pick() for _ in range(20)} == {other}
        assert len(lanes) == 8


@pytest.mark.slow
async def test_a_request_that_targets_stand_still_under_stops_two_at_most():
    verifiers = [Misbehaving(TableVerifier(Table()), closes_on=1000) for _ in range(4)]
    async with cluster(verifiers, watchdog_s=8.0, stuck_after_s=0.3) as found:
        try:
            with pytest.raises(GivenUp, match="replicas failed 2 times under this request"):
                await found.client.generate(token_ids=POISON, max_tokens=5)
            assert sum(each.entered.is_set() for each in verifiers) == 2
        finally:
            for each in verifiers:
                each.gate.set()


@pytest.mark.slow
async def test_an_outage_is_told_to_all_at_the_same_time():
    """Once the replays took turns in waiting for a target, and the last of them was told by its deadline."""
    held, wait_s = Misbehaving(TableVerifier(Table()), closes_at=1), 1.0

    async def told(client: Client, seed: int) -> float:
        """When the request ended."""
        with pytest.raises(NoReplica):
            await client.generate(token_ids=PROMPT, max_tokens=9, seed=seed)
        return time.monotonic()

    async with cluster([held], target_wait_s=wait_s) as found:
        tasks = [asyncio.create_task(told(found.client, seed)) for seed in range(8)]
        await live(found.orchestrator, 8)
        await held.in_a_pass()
        await found.targets[0]._server.stop()
        held.gate.set()
        ended = await asyncio.gather(*tasks)
        assert max(ended) - min(ended) < wait_s, "seven waits, if they take turns"
