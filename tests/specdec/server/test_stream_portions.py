"""What one frame may do to a service, however much is in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from bench.models.table_model import Table, TableDrafter, TableVerifier
from draft_service.codec import DraftCodec
from draft_service.engine import DraftEngine
from specdec.server.streams import StreamServer, _Stream
from specdec.v1 import common_pb2, draft_pb2, target_pb2
from target_service.codec import TargetCodec
from target_service.engine import TargetEngine


async def test_a_frame_about_nobody_is_taken_as_fast_as_its_errors_are():
    verifier = TableVerifier(Table())
    server = StreamServer(TargetEngine(verifier), TargetCodec(verifier.info), "target")
    stream = _Stream(0, server.step_loop, TargetCodec(verifier.info))
    frame = target_pb2.VerifyRequest(rounds=[target_pb2.Round(sequence=100)] * 2_000)
    told = 0
    for _ in stream.take(frame):
        if not stream.not_held.is_set():
            content = await stream.content()
            assert content is not None
            assert len(content[0]) < 50, "nothing more is listened to"
            told += len(content[0])
    assert told + len(stream._outbox) == 2_000
    await server.stop()


async def test_a_large_frame_leaves_others_their_turn():
    verifier = TableVerifier(Table())
    server = StreamServer(TargetEngine(verifier), TargetCodec(verifier.info), "target")
    stream = _Stream(0, server.step_loop, TargetCodec(verifier.info))
    frame = target_pb2.VerifyRequest(closes=[7] * 1_000)
    assert sum(1 for _ in stream.take(frame)) == 3
    await server.stop()


async def test_a_stream_that_ends_within_its_opens_leaves_nothing_behind():
    drafter = TableDrafter(Table())
    engine = DraftEngine(drafter)
    server = StreamServer(engine, DraftCodec(drafter.info), "draft")
    ever = asyncio.Event()
    unfinished = common_pb2.SequenceSpec(token_ids=[1])
    opens = [draft_pb2.DraftOpen(sequence=number, more=True, spec=unfinished) for number in range(1, 21)]

    async def frames() -> AsyncIterator[Any]:
        yield draft_pb2.DraftRequest(opens=opens)
        await ever.wait()

    responses = server.serve(frames())
    response = asyncio.create_task(anext(responses))
    while not server._streams or not next(iter(server._streams.values()))._partial:
        await asyncio.sleep(0)
    response.cancel()
    await asyncio.gather(response, return_exceptions=True)
    await responses.aclose()
    for _ in range(10):
        await asyncio.sleep(0)
    await server.stop()
    assert not engine._held
    assert not server._streams
