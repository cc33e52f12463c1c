"""The server end of a stream without gRPC: frames in, frames out, however much is in one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from draft_service.codec import DraftCodec
from draft_service.engine import DraftEngine
from specdec.core.errors import Draining, PassFailed, from_status
from specdec.core.sequence import SequenceSpec
from specdec.server.streams import StreamServer
from specdec.transport.wire import write_spec
from specdec.v1 import common_pb2, draft_pb2, target_pb2
from target_service.codec import TargetCodec
from target_service.engine import TargetEngine
from testing.table_model import Table, TableDrafter, TableVerifier

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


async def test_a_drain_ends_when_every_peer_has_read_the_end_of_its_sequences(server):
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
        assert not drain.done(), "that frame is not written yet"
        after = asyncio.create_task(anext(stream))
        await drain
    after.cancel()
    await asyncio.gather(after, return_exceptions=True)
    await stream.aclose()


async def test_a_drain_waits_no_longer_than_it_may_for_a_peer_that_reads_nothing(server):
    stream = await opened(server)
    async with asyncio.timeout(PATIENCE_S):
        await server.drain(0.05)
    await stream.aclose()


@pytest.mark.parametrize("per_frame", [1, 2_000])
async def test_no_more_is_read_from_a_peer_that_does_not_read_its_answers(server, per_frame):
    """Its answers would wait in memory without a limit. Once it reads, the rest follows."""
    num_frames, num_read = 2_000 // per_frame, 0

    async def frames() -> AsyncGenerator[Any, None]:
        nonlocal num_read
        for _ in range(num_frames):
            num_read += 1
            yield target_pb2.VerifyRequest(rounds=[target_pb2.Round(sequence=100)] * per_frame)  # an error each
            await asyncio.sleep(0)

    stream = server.serve(frames())
    errors = [len((await anext(stream)).errors)]
    for _ in range(1000):
        await asyncio.sleep(0)
    assert num_read < 100
    async with asyncio.timeout(PATIENCE_S):
        errors += [len(response.errors) async for response in stream]
    assert (num_read, sum(errors)) == (num_frames, 2_000)
    assert max(errors) < 50


async def test_a_large_frame_leaves_other_tasks_their_turn(server):
    taken: list[int] = []
    num_turns = 0

    async def frames() -> AsyncGenerator[Any, None]:
        for closes in ([], [7] * 1_000):
            began = num_turns
            yield target_pb2.VerifyRequest(closes=closes)
            taken.append(num_turns - began)

    async def count() -> None:
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    counting = asyncio.create_task(count())
    async for _ in server.serve(frames()):
        pass
    counting.cancel()
    assert taken[1] >= taken[0] + 3


async def test_a_stream_that_ends_within_its_opens_leaves_nothing_behind():
    paused: set[int] = set()

    class Engine(DraftEngine):
        def pause(self, stream: int, is_paused: bool) -> None:
            (paused.add if is_paused else paused.discard)(stream)
            super().pause(stream, is_paused)

    drafter = TableDrafter(TABLE)
    server = StreamServer(Engine(drafter), DraftCodec(drafter.info), "draft")
    taken = asyncio.Event()
    unfinished = common_pb2.SequenceSpec(token_ids=[1])
    opens = [draft_pb2.DraftOpen(sequence=number, more=True, spec=unfinished) for number in range(1, 21)]

    async def frames() -> AsyncGenerator[Any, None]:
        yield draft_pb2.DraftRequest(opens=opens)
        taken.set()
        await asyncio.Event().wait()

    responses = server.serve(frames())
    response = asyncio.create_task(anext(responses))
    await taken.wait()
    response.cancel()
    await asyncio.gather(response, return_exceptions=True)
    await responses.aclose()
    for _ in range(10):
        await asyncio.sleep(0)
    await server.stop()
    assert not paused
    assert (server.load.open_streams, server.load.live_sequences) == (0, 0)


async def test_a_stream_that_reads_nothing_is_decoded_no_further():
    verifier = TableVerifier(TABLE, pass_s=0.003)
    engine = TargetEngine(verifier)
    server = StreamServer(engine, TargetCodec(verifier.info), "test-model")

    async def frames() -> AsyncGenerator[Any, None]:
        opens = [target_pb2.TargetOpen(sequence=1, spec=write_spec(SequenceSpec((1, 2, 3), 3)))]
        yield target_pb2.VerifyRequest(opens=opens, rounds=[])
        while engine.load.passes < 1:
            await asyncio.sleep(0.001)
        yield target_pb2.VerifyRequest(rounds=[target_pb2.Round(sequence=1, number=1, base=4, num_autonomous=1 << 31)])
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


async def test_a_fault_of_our_own_while_a_stream_is_read_ends_the_stream_and_is_logged(server, caplog):
    async def frames() -> AsyncGenerator[Any, None]:
        yield target_pb2.VerifyRequest()
        raise ValueError("a fault of our own")

    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(PassFailed):
            async for _ in server.serve(frames()):
                pass
    assert "could not be read" in caplog.text
