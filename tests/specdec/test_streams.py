"""The server end of a stream without gRPC: frames in, frames out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from bench.table_model import Table, TableVerifier
from specdec.errors import Draining, from_status
from specdec.sequence import SequenceSpec
from specdec.streams import StreamServer
from specdec.v1 import target_pb2
from specdec.wire import write_spec
from target_service.codec import TargetCodec
from target_service.engine import TargetEngine

PATIENCE_S = 10.0
TABLE = Table()


@pytest.fixture
async def server() -> AsyncGenerator[StreamServer, None]:
    verifier = TableVerifier(TABLE)
    made = StreamServer(TargetEngine(verifier), TargetCodec(verifier.info), "test-model")
    yield made
    await made.stop()


async def opened(server: StreamServer) -> Any:
    """A stream with a sequence whose open is answered, and the answer taken."""

    async def frames() -> AsyncGenerator[Any, None]:
        spec = write_spec(SequenceSpec((1, 2, 3), 3))
        yield target_pb2.VerifyRequest(opens=[target_pb2.TargetOpen(sequence=1, spec=spec)])
        await asyncio.Event().wait()

    stream = server.serve(frames())
    while not (await anext(stream)).verdicts:
        pass
    return stream


async def test_a_drain_ends_when_every_peer_has_taken_the_end_of_its_sequences(server):
    stream = await opened(server)
    drain = asyncio.create_task(server.drain(PATIENCE_S))
    async with asyncio.timeout(PATIENCE_S):
        while server.load.live_sequences:
            await asyncio.sleep(0.001)
        response = await anext(stream)
        while not response.errors:
            response = await anext(stream)
        assert type(from_status(response.errors[0].status)) is Draining
        await asyncio.sleep(0.1)
        assert not drain.done(), "nobody has come back from writing that"
        after = asyncio.create_task(anext(stream))
        await drain
    after.cancel()
    await asyncio.gather(after, return_exceptions=True)
    await stream.aclose()


async def test_a_drain_waits_for_a_peer_that_takes_nothing_no_longer_than_it_may(server):
    stream = await opened(server)
    async with asyncio.timeout(PATIENCE_S):
        await server.drain(0.05)
    await stream.aclose()
