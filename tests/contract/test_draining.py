"""A service that goes away: what it still answers, what it refuses, and which sequences it tells."""

from __future__ import annotations

import asyncio

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.core.errors import Draining
from target_service.language_model import LmVerifier
from testing.misbehaving import Misbehaving
from testing.patience import PATIENCE_S
from testing.raw import draft, draft_open, round_, target, target_open
from tests.cluster import orders_wait
from tests.models.table_runner import TableRunner


async def test_draining_ends_sequences_at_their_rounds_end_and_refuses_opens() -> None:
    verifier = Misbehaving(LmVerifier(TableRunner()))
    async with target(verifier) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1), target_open(2)])
        await asyncio.gather(stream.answer(1), stream.answer(2))
        verifier.gate.clear()
        await stream.send(rounds=[round_(1, 1, 4)])
        await verifier.in_a_pass()
        stopping = asyncio.create_task(service.server.stop(PATIENCE_S))
        await stream.send(opens=[target_open(3)])
        await orders_wait(service.server, 2)
        verifier.gate.set()
        assert (await stream.answer(1)).round == 1  # what was asked is answered
        for s in (1, 2, 3):
            assert type(await stream.error(s)) is Draining
        await stopping
        await stream.status()


async def test_a_draining_draft_answers_and_then_ends_its_sequences() -> None:
    async with draft(LanguageModelDrafter(TableRunner())) as service:
        stream = service.stream()
        await stream.send(opens=[draft_open(1, max_nodes=3), draft_open(2)])
        await asyncio.gather(stream.answer(1), stream.answer(2))
        await service.server.stop(PATIENCE_S)
        for s in (1, 2):
            assert type(await stream.error(s)) is Draining
