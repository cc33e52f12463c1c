"""Rounds that are sent on a stream before the verdict on the one before."""

from __future__ import annotations

import grpc

from specdec.core.rounds import EARLY
from target_service.language_model import LmVerifier
from testing.misbehaving import Misbehaving
from testing.raw import GREEDY, Raw, Service, round_, target, target_open, tree
from tests.cluster import orders_wait
from tests.models.table_runner import TableRunner

TEXT = TableRunner().greedy_text([1, 2, 3], 8)


def gated() -> Misbehaving:
    """Closed when the first round is verified."""
    return Misbehaving(LmVerifier(TableRunner()), closes_at=2)


async def both_sent(service: Service, verifier: Misbehaving, token_ids: list[int]) -> Raw:
    """Round 1 is in a pass that waits, and round 2 has come."""
    stream = service.stream()
    await stream.ask(target_open(1, **GREEDY))
    await stream.send(rounds=[round_(1, 1, 4)])
    await verifier.in_a_pass()
    await stream.send(rounds=[round_(1, 2, 4, tree(token_ids))])
    await orders_wait(service.server)
    return stream


async def test_a_target_tells_that_it_takes_early_rounds() -> None:
    async with target(gated()) as service:
        assert EARLY in (await service.info()).model.capabilities


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


async def test_a_dropped_round_gets_no_answer() -> None:
    verifier = gated()
    async with target(verifier) as service:
        stream = await both_sent(service, verifier, [(TEXT[1] + 1) % 8, 0])
        await stream.half_close()
        verifier.gate.set()
        verdict = await stream.answer(1)
        assert (verdict.round, verdict.dropped_round) == (1, 2)
        assert await stream.status() is grpc.StatusCode.OK
        assert stream.unread(1) == 0


async def test_heartbeats_come_until_both_are_answered() -> None:
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
