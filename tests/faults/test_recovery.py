"""What the fault table found, in small: each of these once failed."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from bench.chaos.fault_proxy import FaultProxy
from bench.chaos.traffic import Asked
from bench.models.table_model import Table, TableDrafter, TableVerifier
from orchestrator.api.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec.client import Client
from specdec.core.errors import NoReplica, PassFailed
from specdec.core.settings import EngineSettings
from target_service.server import create_server as create_target_server
from tests.cluster import cluster, connected

PROMPT = {"token_ids": [1, 2, 3]}


def verifier(**arguments):
    return TableVerifier(Table(), pass_s=0.005, **arguments)


def assert_same(sample, max_tokens, seed, temperature=1.0):
    """Every token is the table's own."""
    asked = Asked(tuple(PROMPT["token_ids"]), max_tokens, seed, temperature)
    assert sample.token_ids == asked.expected(Table())


async def test_all_requests_of_a_client_survive_the_loss_of_its_first_orchestrator():
    """They once pushed each other back to the dead address."""
    async with cluster([verifier()], [TableDrafter(Table())]) as found:
        second = OrchestratorServer(OrchestratorSettings(target=[f"127.0.0.1:{found.targets[0].port}"]))
        await second.start()
        try:
            addresses = [f"127.0.0.1:{server.port}" for server in (found.orchestrator, second)]
            async with Client(*addresses) as client:
                requests = [client.generate(token_ids=PROMPT, max_tokens=200, seed=seed) for seed in range(8)]
                tasks = [asyncio.create_task(request) for request in requests]
                while found.orchestrator.live_sequences < 8:
                    await asyncio.sleep(0.01)
                await found.orchestrator.stop()
                for seed, [sample] in enumerate(await asyncio.gather(*tasks)):
                    assert_same(sample, 200, seed)
        finally:
            await second.stop()


@pytest.mark.slow
async def test_connections_that_break_are_no_crashes():
    """A request once ended as poison after two resets, when its target lived all along."""
    target = create_target_server(verifier(), EngineSettings())
    await target.start()
    async with FaultProxy(target.port) as proxy:
        server = OrchestratorServer(OrchestratorSettings(target=[f"127.0.0.1:{proxy.port}"]))
        await server.start()
        try:
            await connected(server)
            async with Client(f"127.0.0.1:{server.port}") as client:
                task = asyncio.create_task(client.generate(token_ids=PROMPT, max_tokens=300, seed=1))
                while not task.done():
                    proxy.reset()
                    await asyncio.sleep(0.15)
                [sample] = await task
                assert_same(sample, 300, seed=1)
        finally:
            await server.stop()
            await target.stop()


async def test_a_refused_open_is_no_replay():
    """Waiting for KV slots once counted as one move after the other."""
    async with cluster([verifier(num_slots=600)]) as found:
        prompt = {"token_ids": list(range(400))}
        requests = [found.client.generate(token_ids=prompt, max_tokens=40, seed=seed) for seed in range(3)]
        for [sample] in await asyncio.gather(*requests):
            assert sample.finish.speculation.num_replays == 0


async def test_one_poisonous_request_ends_alone():
    """Those beside it in two passes that failed once ended with it."""
    async with cluster([verifier(fail_on_token=1000) for _ in range(3)]) as found:
        good = [found.client.generate(token_ids=PROMPT, max_tokens=60, temperature=0.0, seed=seed) for seed in range(6)]
        tasks = [asyncio.create_task(request) for request in good]
        while found.orchestrator.live_sequences < 6:
            await asyncio.sleep(0.01)
        poison = {"token_ids": [1, 1000]}
        [error] = await asyncio.gather(found.client.generate(token_ids=poison, max_tokens=5), return_exceptions=True)
        assert "replicas failed 4 times under this request" in str(error)
        for seed, [sample] in enumerate(await asyncio.gather(*tasks)):
            assert_same(sample, 60, seed, temperature=0.0)


class Held(TableVerifier):
    """Makes no pass before the gate is open."""

    def __init__(self):
        super().__init__(Table())
        self.gate, self.entered = threading.Event(), threading.Event()

    def verify(self, jobs):
        self.entered.set()
        self.gate.wait(60)
        return super().verify(jobs)


class Numberless(TableVerifier):
    """Finds no numbers for a text with token 1000 in it, as target_service.language_model says of NaN."""

    def verify(self, jobs):
        outcomes, timings = super().verify(jobs)
        spoilt = PassFailed("the model computes NaN or infinity for the text of this sequence")
        return [spoilt if 1000 in job.ids else each for job, each in zip(jobs, outcomes, strict=True)], timings


async def test_a_request_without_numbers_is_given_up_and_nobody_beside_it_is_replayed():
    async with cluster([Numberless(Table(), pass_s=0.005) for _ in range(2)]) as found:
        good = [found.client.generate(token_ids=PROMPT, max_tokens=60, temperature=0.0, seed=seed) for seed in range(4)]
        tasks = [asyncio.create_task(request) for request in good]
        while found.orchestrator.live_sequences < 4:
            await asyncio.sleep(0.01)
        with pytest.raises(NoReplica, match="replicas failed 4 times under this request"):
            await found.client.generate(token_ids={"token_ids": [1, 1000]}, max_tokens=5)
        for seed, [sample] in enumerate(await asyncio.gather(*tasks)):
            assert_same(sample, 60, seed, temperature=0.0)
            assert sample.finish.speculation.num_replays == 0
        await found.settled()


class Wedged(TableVerifier):
    """Stands still in its tenth pass, while its event loop goes on to say that it lives."""

    def __init__(self, **arguments):
        super().__init__(Table(), pass_s=0.005, **arguments)
        self.go_on = threading.Event()
        self.num_passes = 0

    def verify(self, jobs):
        self.num_passes += 1
        if self.num_passes == 10:
            self.go_on.wait(60)
        return super().verify(jobs)


@pytest.mark.slow
async def test_a_target_that_lives_but_makes_no_pass_is_left():
    wedged = Wedged()
    async with cluster([wedged, verifier()], watchdog_s=30.0, stuck_after_s=0.5) as found:
        requests = [found.client.generate(token_ids=PROMPT, max_tokens=60, seed=seed) for seed in range(2)]
        samples = await asyncio.gather(*requests)
        wedged.go_on.set()
        for seed, [sample] in enumerate(samples):
            assert_same(sample, 60, seed)
        assert max(sample.finish.speculation.num_replays for [sample] in samples) == 1
        # It is connected again in a moment, and idle; but it must not draw everybody at once.
        left = found.orchestrator.targets.replicas[0]
        async with asyncio.timeout(10):
            while not left.ready:
                await asyncio.sleep(0.01)
        left.lane()
        lanes = [found.orchestrator.targets.replicas[1].lane() for _ in range(8)]
        assert {found.orchestrator.targets.pick() for _ in range(20)} == {found.orchestrator.targets.replicas[1]}
        assert len(lanes) == 8


class WedgedBy(TableVerifier):
    """Stands still in a pass with the token 1000, until it is told to go on."""

    def __init__(self, go_on, **arguments):
        super().__init__(Table(), **arguments)
        self._go_on = go_on
        self.stood_still = False

    def verify(self, jobs):
        if any(1000 in job.ids for job in jobs):
            self.stood_still = True
            self._go_on.wait(60)
        return super().verify(jobs)


@pytest.mark.slow
async def test_a_request_in_which_targets_stand_still_stops_two_at_most():
    go_on = threading.Event()
    verifiers = [WedgedBy(go_on) for _ in range(4)]
    async with cluster(verifiers, watchdog_s=30.0, stuck_after_s=0.5) as found:
        poison = {"token_ids": [1, 1000]}
        try:
            [error] = await asyncio.gather(
                found.client.generate(token_ids=poison, max_tokens=5), return_exceptions=True
            )
            assert "replicas failed 2 times under this request" in str(error)
            assert sum(each.stood_still for each in verifiers) == 2
        finally:
            go_on.set()


@pytest.mark.slow
async def test_an_outage_is_told_to_all_at_the_same_time():
    """Once the replays took turns in waiting for a target, and the last of them was told by its deadline."""
    held = Held()
    wait_s = 2.0

    async def told(client, seed):
        """When the request ended."""
        with pytest.raises(NoReplica):
            await client.generate(token_ids=PROMPT, max_tokens=9, seed=seed)
        return time.monotonic()

    async with cluster([held], target_wait_s=wait_s) as found:
        tasks = [asyncio.create_task(told(found.client, seed)) for seed in range(8)]
        while found.orchestrator.live_sequences < 8 or not held.entered.is_set():
            await asyncio.sleep(0.01)
        await found.targets[0]._server.stop()
        held.gate.set()
        ended = await asyncio.gather(*tasks)
        assert max(ended) - min(ended) < wait_s, "seven waits, if they take turns"
