"""A model that hangs or fails every pass: its service says that it is not ready, then not alive, then it ends."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec.core.errors import PassFailed
from specdec.server.liveness import RESTART_STATUS
from specdec.transport import rpc
from specdec.transport.rpc import LIVENESS
from specdec.v1 import target_pb2, target_pb2_grpc
from target_service.server import SERVICE
from target_service.verifier import Job
from testing.lab import Lab, Process, load_of
from testing.patience import PATIENCE_S
from testing.raw import Raw, Service, after, round_, target, target_open
from testing.table_model import Table, TableVerifier

POISON = 7
"""A token that hangs a pass."""


class Held(TableVerifier):
    """Passes wait while the gate is closed, and raise while ``raises`` is set."""

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
    async with target(verifier, hung_pass_s=0.3) as service:
        assert [await says(service, name) for name in ("", SERVICE, LIVENESS)] == ["SERVING"] * 3
        stream = service.stream()
        verifier.gate.clear()
        await stream.send(opens=[target_open(1)])
        seen = []
        async with asyncio.timeout(PATIENCE_S):
            while await says(service, LIVENESS) == "SERVING":
                seen.append(await says(service, ""))
        assert "SERVING" in seen, "a pass may take a while"
        assert "NOT_SERVING" in seen, "no new work is to come before it is given up"
        assert [await says(service, name) for name in ("", SERVICE)] == ["NOT_SERVING"] * 2
        assert "a pass has run for" in await asyncio.wait_for(service.server.stuck(), PATIENCE_S)
        verifier.gate.set()


async def test_a_pass_that_was_only_slow_makes_its_service_ready_again() -> None:
    verifier = Held()
    async with target(verifier, hung_pass_s=0.5) as service:
        stream = service.stream()
        verifier.gate.clear()
        await stream.send(opens=[target_open(1)])
        await until_it_says(service, "", "NOT_SERVING")
        assert await says(service, LIVENESS) == "SERVING"
        verifier.gate.set()
        assert (await stream.answer(1)).round == 0
        await until_it_says(service, "", "SERVING")


async def test_an_idle_service_has_not_hung() -> None:
    async with target(Held(), hung_pass_s=0.1) as service:
        stream = service.stream()
        await stream.ask(target_open(1))
        for _ in range(6):
            await asyncio.sleep(0.05)
            assert [await says(service, name) for name in ("", LIVENESS)] == ["SERVING"] * 2
        assert (await stream.ask(round_(1, 1, 4))).round == 1


async def test_a_device_that_fails_every_pass_is_given_up_and_a_request_that_does_is_not() -> None:
    verifier = Held()
    async with target(verifier, hung_pass_s=4.0) as service:
        stream = service.stream()
        for sequence in range(1, 40):  # four failures, then a pass that is made, and so on
            verifier.raises = sequence % 5 != 0
            await stream.ask(target_open(sequence))
        assert await says(service, LIVENESS) == "SERVING"
        verifier.raises = True
        for sequence in range(40, 48):
            await stream.send(opens=[target_open(sequence)])
            await stream.error(sequence)
        assert "passes failed in a row" in await asyncio.wait_for(service.server.stuck(), PATIENCE_S)
        assert [await says(service, name) for name in ("", LIVENESS)] == ["NOT_SERVING"] * 2


async def test_passes_of_which_something_is_computed_are_not_given_up() -> None:
    """A text under which passes raise is always in company."""

    class Picky(TableVerifier):
        def verify(self, jobs: Sequence[Job]) -> Any:
            if any(POISON in job.ids for job in jobs):
                raise RuntimeError("planted")
            return super().verify(jobs)

    async with target(Picky(Table()), hung_pass_s=4.0) as service:
        stream = service.stream()
        for sequence in range(1, 24, 2):
            poisoned = target_open(sequence + 1, token_ids=[1, POISON, 2])
            await stream.send(opens=[target_open(sequence), poisoned])
            assert (await stream.answer(sequence)).round == 0
            assert type(await stream.error(sequence + 1)) is PassFailed
        assert await says(service, LIVENESS) == "SERVING"
        assert not service.server.servicer.streams.step_loop.failed_in_a_row


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_model_thread_that_died_is_given_up() -> None:
    verifier = Held()
    async with target(verifier, hung_pass_s=4.0) as service:
        engine = service.server.servicer.streams.step_loop.engine
        engine.working_on = None  # type: ignore[method-assign, assignment]  # the step loop does not survive this
        verifier.raises = True
        stream = service.stream()
        await stream.send(opens=[target_open(1)])
        assert "thread has died" in await asyncio.wait_for(service.server.stuck(), PATIENCE_S)


@asynccontextmanager
async def started(make: Callable[..., Process], *flags: str) -> AsyncIterator[tuple[Process, Raw]]:
    """A target in a process, and a stream to it."""
    process = make("testing.table_service target", *flags)
    await process.start()
    await process.healthy()
    async with rpc.channel(process.address) as channel:
        stream = Raw(target_pb2_grpc.TargetServiceStub(channel).Verify(), target_pb2.VerifyRequest)
        yield process, stream
        await stream.close()


async def stopped_for_a_while_it_goes_on(make: Callable[..., Process]) -> None:
    async with started(make, "--pass-ms=150", "--hung-pass-s=0.5") as (process, stream):
        await stream.send(opens=[target_open(1)])
        await asyncio.sleep(0.05)
        process.freeze()
        await asyncio.sleep(1.5)
        process.thaw()
        base = (await stream.answer(1)).base + 1
        for number in range(1, 6):
            base = after(base, await stream.ask(round_(1, number, base)))
        assert process.returncode is None


async def stuck_it_ends(make: Callable[..., Process]) -> None:
    async with started(make, f"--hang-on-token={POISON}", "--hung-pass-s=0.5") as (process, stream):
        await stream.send(opens=[target_open(1, token_ids=[1, 2, POISON])])
        assert await process.ended(PATIENCE_S) == RESTART_STATUS
        assert "gives itself up" in process.log_tail()


async def hanging_while_it_drains_it_ends(make: Callable[..., Process]) -> None:
    async with started(make, f"--hang-on-token={POISON}", "--shutdown-grace-s=0.2") as (process, stream):
        await stream.send(opens=[target_open(1, token_ids=[1, 2, POISON])])
        async with asyncio.timeout(PATIENCE_S):
            while not (await load_of(process.address, "target")).waiting_sequences:
                await asyncio.sleep(0.02)
        process.signal(signal.SIGTERM)
        assert await process.ended(PATIENCE_S) == RESTART_STATUS
        assert "a pass hangs" in process.log_tail()


@pytest.mark.slow
async def test_a_process_that_hangs_ends_with_a_status_of_failure_and_one_that_was_stopped_does_not() -> None:
    """Side by side, for most of what they take is waiting."""
    async with Lab(1).processes() as make:
        scenarios = (stopped_for_a_while_it_goes_on, stuck_it_ends, hanging_while_it_drains_it_ends)
        await asyncio.gather(*(scenario(make) for scenario in scenarios))
