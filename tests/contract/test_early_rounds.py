"""Rounds that are sent before the verdict on the one before, on a stream."""

from __future__ import annotations

import grpc

from specdec.core.rounds import EARLY
from specdec.v1 import common_pb2
from tests.contract.raw import PATIENCE_S, Raw, Service, round_, target, target_open, tree
from tests.models.failing import GREEDY, GatedVerifier, greedy_text
from tests.models.table_runner import TableRunner

TEXT = greedy_text(TableRunner(), [1, 2, 3], 8)


def gated() -> GatedVerifier:
    """Closed when the first round is verified."""
    return GatedVerifier(TableRunner(), closes_at=2)


async def both_sent(service: Service, verifier: GatedVerifier, token_ids: list[int]) -> Raw:
    """Round 1 is in a pass that waits, and round 2 has come."""
    stream = service.stream()
    await stream.send(opens=[target_open(1, **GREEDY)])
    await stream.answer(1)
    await stream.send(rounds=[round_(1, 1, 4)])
    await verifier.in_a_pass()
    await stream.send(rounds=[round_(1, 2, 4, tree(token_ids))])
    while not service.server.servicer.streams._loop._inbox.qsize():
        await service.load()
    return stream


async def test_a_target_says_that_it_takes_them() -> None:
    async with target(gated()) as service:
        info = await service._get_info(common_pb2.GetModelInfoRequest(), timeout=PATIENCE_S)
        assert EARLY in info.model.capabilities


async def test_both_are_answered_and_a_stream_that_is_half_closed_ends_after_them() -> None:
    verifier = gated()
    async with target(verifier) as service:
        stream = await both_sent(service, verifier, TEXT[1:6])
        await stream.half_close()
        verifier.gate.set()
        first, second = await stream.answer(1), await stream.answer(1)
        assert (first.round, first.base, first.dropped_round) == (1, 4, 0)
        assert (second.round, second.base, list(second.accepted)) == (2, 5, [1, 2, 3, 4])
        assert await stream.status() is grpc.StatusCode.OK


async def test_one_that_is_dropped_owes_nothing() -> None:
    verifier = gated()
    async with target(verifier) as service:
        stream = await both_sent(service, verifier, [(TEXT[1] + 1) % 8, 0])
        await stream.half_close()
        verifier.gate.set()
        verdict = await stream.answer(1)
        assert (verdict.round, verdict.dropped_round) == (1, 2)
        assert await stream.status() is grpc.StatusCode.OK
        assert stream.unread(1) == 0


async def test_there_are_heartbeats_until_both_are_answered() -> None:
    verifier = gated()
    async with target(verifier) as service:
        stream = await both_sent(service, verifier, TEXT[1:6])
        verifier.entered.clear()
        verifier.closes_at = 3
        verifier.gate.set()
        await stream.answer(1)
        await verifier.in_a_pass()
        heard = len(stream.frames)
        await stream.frame_where(lambda frame: frame in stream.frames[heard:] and frame.progress)
        verifier.gate.set()
        assert (await stream.answer(1)).round == 2
