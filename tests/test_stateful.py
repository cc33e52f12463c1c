"""Under any schedule of faults the text is the table's own, and nothing is left behind.

The schedules are random, over real orchestrators, targets and drafts on loopback. The oracle is the table, a pure
function. What a schedule hits depends on the machine's speed; its outcome does not.
"""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from draft_service.server import create_server as create_draft_server
from orchestrator import outbox
from orchestrator.api.server import OrchestratorServer
from orchestrator.replicas import pool
from orchestrator.replicas.lane import Lane
from orchestrator.settings import OrchestratorSettings
from specdec.client import Client
from specdec.core.errors import InvalidArgument, OutOfStep, Preempted, SpecdecError
from specdec.core.sequence import SequenceSpec
from specdec.core.settings import EngineSettings
from specdec.v1 import generation_pb2, generation_pb2_grpc
from target_service.server import create_server as create_target_server
from testing.misbehaving import Misbehaving
from testing.patience import PATIENCE_S, eventually
from testing.raw import started
from testing.table_model import TableDrafter, TableVerifier
from tests.cluster import connected
from tests.models.scripted import BranchingDrafter
from tests.models.table_reader import TABLE, Reader, continuation, directly

pytestmark = pytest.mark.slow


def text_of(spec: SequenceSpec) -> list[int]:
    return continuation(TABLE, spec, spec.token_ids[: spec.num_prompt_tokens], 60)


class Service:
    """One service at one address, up or down."""

    def __init__(self, role: str, index: int, world: World) -> None:
        self.role, self.index, self.world = role, index, world
        self.server: Any = None
        self.port = 0
        self.verifier: Misbehaving | None = None
        self.leaving: asyncio.Task[None] | None = None  # while it drains

    @property
    def up(self) -> bool:
        return self.server is not None and self.leaving is None

    async def start(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while True:
                self.server = self._new()
                try:
                    await self.server.start()
                    break
                except OSError:  # another socket had the port for a moment
                    await self.server.stop()
                    await asyncio.sleep(0.05)
        self.port = self.server.port

    def _new(self) -> Any:
        if self.role == "target":
            self.verifier = Misbehaving(TableVerifier(TABLE, (220, 2000)[self.index], pass_s=0.001, chunk_rows=4))
            return create_target_server(self.verifier, EngineSettings(port=self.port))
        if self.role == "draft":
            drafter = TableDrafter(TABLE) if self.index else BranchingDrafter(TABLE.info("table"), text_of)
            return create_draft_server(drafter, EngineSettings(port=self.port))
        return OrchestratorServer(
            OrchestratorSettings(
                port=self.port,
                target=[f"127.0.0.1:{each.port}" for each in self.world.of("target")],
                draft=[f"127.0.0.1:{each.port}" for each in self.world.of("draft")],
                park_after_s=0.02,
                num_ahead_tokens=6,
                watchdog_s=PATIENCE_S,
                target_wait_s=2 * PATIENCE_S,
            )
        )

    async def kill(self) -> None:
        """As SIGKILL: without a word."""
        server, self.server = self.server, None
        if self.role == "orchestrator":
            await server.stop()
        else:
            await server._server.grpc.stop(None)
            await server.stop()  # what is left of it in this process

    async def drain(self) -> None:
        await self.server.stop(PATIENCE_S)
        self.server = self.leaving = None


class World:
    """Two targets (one short of memory), two drafts, two orchestrators, two clients, any number of requests."""

    def __init__(self) -> None:
        self.services = [Service(role, i, self) for role in ("target", "draft", "orchestrator") for i in range(2)]
        self.readers: list[Reader] = []
        self.clients: list[Client] = []
        self.num_chunks = self.num_moves = self._num_crashes = 0

    def of(self, role: str) -> list[Service]:
        return [each for each in self.services if each.role == role]

    def num_crashes(self, begun: bool = False) -> int:
        """Killed targets and failed passes; ``begun``: those that are past."""
        pending = sum(each.verifier.to_fail for each in self.of("target") if each.verifier)
        return self._num_crashes - begun * pending

    async def start(self) -> None:
        for each in self.services:
            await each.start()
        addresses = [f"127.0.0.1:{each.port}" for each in self.of("orchestrator")]
        self.clients = [Client(*addresses), Client(*reversed(addresses))]
        for each in self.of("orchestrator"):
            await connected(each.server, PATIENCE_S)

    async def do(self, verb: str, draw: random.Random) -> None:
        verb, _, role = verb.partition(" ")
        if verb in ("kill", "drain"):
            # A client survives the loss of one orchestrator, not of both.
            if role == "orchestrator" and not all(each.up for each in self.of(role)):
                return
            up = [each for each in self.of(role) if each.up]
            if up:
                await getattr(self, verb)(draw.choice(up))
        elif verb == "restart":
            if down := [each for each in self.services if not each.up]:
                await self.restart(draw.choice(down))
        else:
            await getattr(self, verb)(draw)

    async def open(self, draw: random.Random) -> None:
        fields = {
            "token_ids": {"token_ids": [draw.randrange(TABLE.vocab_size) for _ in range(draw.randint(1, 12))]},
            "max_tokens": draw.randint(1, 60),
            "temperature": draw.choice([0.0, 0.8]),
            "seed": draw.getrandbits(64),
            "n": draw.choice([1, 1, 2, 3]),
            "num_draft_tokens": draw.choice([None, *range(7)]),
            "stop_token_ids": draw.sample(range(TABLE.vocab_size), draw.choice([0, 0, 1])),
        }
        up = [each for each in self.of("orchestrator") if each.up]
        if draw.random() < 0.4:
            request = generation_pb2.GenerateRequest(**fields)  # type: ignore[arg-type]
            responses = directly(draw.choice(up).server._servicer, request)
            self.readers.append(Reader(self, fields, responses, direct=True))
        else:
            responses = draw.choice(self.clients).stream(**fields)
            self.readers.append(Reader(self, fields, responses, direct=False))

    async def progress(self, draw: random.Random) -> None:
        """Until so many chunks came, if they come."""
        wanted = self.num_chunks + draw.randint(1, 20)
        for _ in range(15):
            if self.num_chunks >= wanted:
                return
            await asyncio.sleep(0.002)

    async def kill(self, service: Service) -> None:
        self._num_crashes += service.role == "target"
        if service.role == "orchestrator":
            self.num_moves += 1
            for reader in self.readers:
                if reader.direct:  # its client is gone with it
                    await reader.cancel()
        await service.kill()

    async def drain(self, service: Service) -> None:
        service.leaving = asyncio.create_task(service.drain())

    async def restart(self, service: Service) -> None:
        if service.leaving:
            await asyncio.wait_for(service.leaving, PATIENCE_S)
        await service.start()
        if service.role == "orchestrator":
            info = generation_pb2.GetServerInfoRequest()
            for number, client in enumerate(self.clients):  # their channels may be waiting for their next attempt
                stub = generation_pb2_grpc.GenerationServiceStub(client._lines[service.index ^ number].channel)
                await stub.GetServerInfo(info, wait_for_ready=True, timeout=PATIENCE_S)

    async def preempt(self, draw: random.Random) -> None:
        draw.choice(self.of("target")).verifier.script((), *[Preempted("planted")] * draw.randint(1, 3))

    async def fail(self, draw: random.Random) -> None:
        if up := [each for each in self.of("target") if each.up]:
            draw.choice(up).verifier.to_fail += 1
            self._num_crashes += 1

    async def park(self, draw: random.Random) -> None:
        if self.readers:
            draw.choice(self.readers).gate.clear()

    async def read_on(self, draw: random.Random) -> None:
        if self.readers:
            draw.choice(self.readers).gate.set()

    async def cancel(self, draw: random.Random) -> None:
        if self.readers:
            await draw.choice(self.readers).cancel()

    async def finish(self) -> None:
        """All services are up and all clients read: every request ends as it must, and nothing is left."""
        for each in self.services:
            if not each.up:
                await self.restart(each)
        for reader in self.readers:
            reader.gate.set()
        if self.readers:
            _, hanging = await asyncio.wait([reader.task for reader in self.readers], timeout=PATIENCE_S)
            assert not hanging, [reader.fields for reader in self.readers if reader.task in hanging]
        for reader in self.readers:
            if not reader.cancelled:
                await reader.task
            reader.check()
        orchestrators, models = self.of("orchestrator"), [*self.of("target"), *self.of("draft")]
        await eventually(lambda: not any(each.server.live_sequences for each in orchestrators))
        await eventually(
            lambda: not any(each.server.load.live_sequences or each.server.load.kv_slots_used for each in models)
        )

    async def stop(self) -> None:
        for reader in self.readers:
            await reader.cancel()
        for client in self.clients:
            await client.__aexit__()
        for each in reversed(self.services):
            if each.role != "orchestrator" and each.up:
                await eventually(lambda server=each.server: not server.load.open_streams)
            if each.leaving:
                await each.leaving
            if each.server:
                await each.server.stop()


REFUSED: list[SpecdecError] = []
"""A replica's answers to entries that break the contract. Our own orchestrator sends none."""


@pytest.fixture(autouse=True, scope="module")
def _impatient_and_never_slow() -> Iterator[None]:
    """On a busy machine no replica counts as slow, and a buffer of few chunks is soon full."""

    def put(lane: Lane, result: Any, put: Any = Lane.put) -> None:
        REFUSED.extend([result] if isinstance(result, OutOfStep | InvalidArgument) else [])
        put(lane, result)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Lane, "put", put)
        patch.setattr(pool, "_COMPARE_EVERY_S", 1e6)
        patch.setattr(outbox, "BUFFERED_EVENTS", 3)
        yield


VERBS = [
    *["open"] * 6,
    *["progress"] * 6,
    *["restart", "preempt", "park", "read_on"] * 2,
    *["cancel", "fail", "kill orchestrator", "kill target", "drain target", "kill draft", "drain draft"],
]


# A schedule that fails may hang at its end, so a failure is shown as it was found; add Phase.shrink to cut it down.
@settings(
    max_examples=6,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(st.lists(st.tuples(st.sampled_from(VERBS), st.integers(0, 2**32)), min_size=30, max_size=60))
def test_the_text_is_the_tables_and_nothing_is_left_whatever_happens(schedule: list[tuple[str, int]]) -> None:
    async def run() -> None:
        async with started(World()) as world:
            for verb, seed in schedule:
                await world.do(verb, random.Random(seed))
            await world.finish()
        await eventually(lambda: len(asyncio.all_tasks()) <= 1)

    REFUSED.clear()
    asyncio.run(run())
    assert REFUSED == []
    assert not [thread.name for thread in threading.enumerate() if thread.name.endswith("-model")]
