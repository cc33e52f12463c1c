"""A model that hangs or fails every pass: its service says that it is not ready, then not alive, then it ends."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from bench.chaos.lab import Lab
from bench.chaos.traffic import Asked, ask
from bench.models.table_model import Table, TableVerifier
from specdec.transport.rpc import LIVENESS
from target_service.server import SERVICE
from target_service.verifier import Job
from tests.contract.raw import PATIENCE_S, Service, round_, target, target_open

HUNG_PASS_S = 0.4


class Held(TableVerifier):
    """Passes wait while the gate is closed, and raise while told to."""

    def __init__(self) -> None:
        super().__init__(Table())
        self.gate = threading.Event()
        self.gate.set()
        self.raises = False

    def verify(self, jobs: Sequence[Job]) -> Any:
        assert self.gate.wait(PATIENCE_S)
        if self.raises:
            raise RuntimeError("the device is gone")
        return super().verify(jobs)


async def says(service: Service, name: str) -> str:
    stub = health_pb2_grpc.HealthStub(service.channel)
    response = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=PATIENCE_S)
    return health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)


async def until_it_says(service: Service, name: str, status: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while await says(service, name) != status:
            await asyncio.sleep(0.01)


async def test_a_pass_that_hangs_is_first_not_ready_and_then_not_alive() -> None:
    verifier = Held()
    async with target(verifier, hung_pass_s=HUNG_PASS_S) as service:
        assert [await says(service, name) for name in ("", SERVICE, LIVENESS)] == ["SERVING"] * 3
        stream = service.stream()
        verifier.gate.clear()
        await stream.send(opens=[target_open(1)])
        seen = []
        async with asyncio.timeout(PATIENCE_S):
            while await says(service, LIVENESS) == "SERVING":
                seen.append(await says(service, ""))
        assert "SERVING" in seen, "a pass may take a while"
        assert "NOT_SERVING" in seen, "nobody is to bring more work before it is given up"
        assert [await says(service, name) for name in ("", SERVICE)] == ["NOT_SERVING"] * 2
        assert "a pass has run for" in await asyncio.wait_for(service.server.stuck(), PATIENCE_S)
        verifier.gate.set()


@pytest.mark.slow
async def test_a_pass_that_was_only_slow_makes_its_service_ready_again() -> None:
    verifier = Held()
    async with target(verifier, hung_pass_s=1.5) as service:
        stream = service.stream()
        verifier.gate.clear()
        await stream.send(opens=[target_open(1)])
        await until_it_says(service, "", "NOT_SERVING")
        assert await says(service, LIVENESS) == "SERVING"
        verifier.gate.set()
        assert (await stream.answer(1)).round == 0
        await until_it_says(service, "", "SERVING")


async def test_idleness_is_not_standing_still() -> None:
    async with target(Held(), hung_pass_s=0.1) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1)])
        await stream.answer(1)
        for _ in range(10):
            await asyncio.sleep(0.05)
            assert [await says(service, name) for name in ("", LIVENESS)] == ["SERVING"] * 2
        await stream.send(rounds=[round_(1, 1, 4)])
        assert (await stream.answer(1)).round == 1


async def test_a_device_that_fails_every_pass_is_given_up_and_a_request_that_does_is_not() -> None:
    verifier = Held()
    async with target(verifier) as service:
        stream = service.stream()
        for sequence in range(1, 40):  # four failures, then a pass that is made, and so on
            verifier.raises = sequence % 5 != 0
            await stream.send(opens=[target_open(sequence)])
            await stream.answer(sequence)
        assert await says(service, LIVENESS) == "SERVING"
        verifier.raises = True
        for sequence in range(40, 48):
            await stream.send(opens=[target_open(sequence)])
            await stream.error(sequence)
        assert "passes failed in a row" in await asyncio.wait_for(service.server.stuck(), PATIENCE_S)
        assert [await says(service, name) for name in ("", LIVENESS)] == ["NOT_SERVING"] * 2


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_model_thread_that_died_is_given_up() -> None:
    verifier = Held()
    async with target(verifier) as service:
        engine = service.server.servicer.streams.step_loop.engine
        engine.working_on = None  # type: ignore[method-assign, assignment]  # the step loop does not survive this
        verifier.raises = True
        stream = service.stream()
        await stream.send(opens=[target_open(1)])
        assert "thread has died" in await asyncio.wait_for(service.server.stuck(), PATIENCE_S)


@pytest.mark.slow
async def test_a_process_that_was_stopped_for_a_while_has_not_hung() -> None:
    flags = ["--pass-ms=150", "--hung-pass-s=1"]
    async with Lab(1).deployment(num_drafts=0, target=flags) as found:
        [target_] = found.targets
        asked = Asked((1, 2, 3), 12, seed=3, temperature=0.0, timeout_s=PATIENCE_S)
        request = asyncio.create_task(ask(found.client, asked))
        await asyncio.sleep(0.4)
        target_.freeze()
        await asyncio.sleep(2.5)
        target_.thaw()
        answer = await request
        assert answer.same(Table()), answer.error
        assert target_.returncode is None


@pytest.mark.slow
async def test_a_service_that_is_stuck_ends_with_a_status_of_failure() -> None:
    poison = 7
    flags = [f"--hang-on-token={poison}", "--hung-pass-s=1"]
    async with Lab(1).deployment(num_drafts=0, target=flags) as found:
        [stuck] = found.targets
        asked = Asked((1, 2, poison), 8, seed=3, temperature=0.0, timeout_s=20.0)
        request = asyncio.create_task(ask(found.client, asked))
        async with asyncio.timeout(PATIENCE_S):
            while stuck.returncode is None:
                await asyncio.sleep(0.05)
        assert stuck.returncode == 3
        assert "gives itself up" in stuck.log_tail()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)


@pytest.mark.slow
async def test_a_service_that_hangs_while_it_drains_ends_all_the_same() -> None:
    poison = 7
    flags = [f"--hang-on-token={poison}", "--shutdown-grace-s=0.2"]
    async with Lab(1).deployment(num_drafts=0, target=flags) as found:
        [hanging] = found.targets
        asked = Asked((1, 2, poison), 8, seed=3, temperature=0.0, timeout_s=20.0)
        request = asyncio.create_task(ask(found.client, asked))
        async with asyncio.timeout(PATIENCE_S):
            while not (await found.loads())[0].waiting_sequences:
                await asyncio.sleep(0.02)
        hanging.signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while hanging.returncode is None:
                await asyncio.sleep(0.05)
        assert hanging.returncode == 3
        assert "a pass hangs" in hanging.log_tail()
        request.cancel()
        await asyncio.gather(request, return_exceptions=True)
