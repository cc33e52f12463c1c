"""The server end of a stream without gRPC: frames in, frames out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from bench.models.table_model import Table, TableVerifier
from specdec.core.errors import Draining, from_status
from specdec.core.sequence import SequenceSpec
from specdec.server.streams import StreamServer
from specdec.transport.wire import write_spec
from specdec.v1 import target_pb2
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


async def test_who_does_not_take_what_was_said_is_not_listened_to(server):
    """What it was told would wait in memory for ever, and more and more of it."""
    num_read = 0

    async def frames() -> AsyncGenerator[Any, None]:
        nonlocal num_read
        for number in range(10_000):
            num_read += 1
            yield target_pb2.VerifyRequest(rounds=[target_pb2.Round(sequence=number)])  # never opened: an error each
            await asyncio.sleep(0)

    stream = server.serve(frames())
    num_errors = len((await anext(stream)).errors)
    for _ in range(1000):
        await asyncio.sleep(0)
    assert num_read < 100
    async with asyncio.timeout(PATIENCE_S):
        async for response in stream:  # and once it takes what was said, everything goes on
            num_errors += len(response.errors)
    assert num_errors == num_read == 10_000


async def test_a_stream_that_takes_nothing_is_told_nothing_unasked():
    verifier = TableVerifier(TABLE, pass_s=0.003)
    engine = TargetEngine(verifier)
    server = StreamServer(engine, TargetCodec(verifier.info), "test-model")

    async def frames() -> AsyncGenerator[Any, None]:
        opens = [target_pb2.TargetOpen(sequence=1, spec=write_spec(SequenceSpec((1, 2, 3), 3)))]
        yield target_pb2.VerifyRequest(opens=opens, rounds=[])
        while engine.load.passes < 1:
            await asyncio.sleep(0.001)
        yield target_pb2.VerifyRequest(rounds=[target_pb2.Round(sequence=1, round=1, base=4, run_on=1 << 31)])
        await asyncio.Event().wait()

    stream = server.serve(frames())
    num_verdicts = len((await anext(stream)).verdicts)
    async with asyncio.timeout(PATIENCE_S):
        while not (engine.idle and engine.load.passes > 1):
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert engine.load.passes < 60
        while num_verdicts < 66:  # the open's, the round's and those that it allowed
            num_verdicts += len((await anext(stream)).verdicts)
    assert engine.idle
    await stream.aclose()
    await server.stop()
