"""A pass that fails loses the sequences that were in it, and nothing else."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.core.errors import PassFailed
from specdec.v1 import draft_pb2
from target_service.language_model import LmVerifier
from testing.misbehaving import MODELS_OWN, Misbehaving
from testing.raw import advance, draft, draft_open, round_, target, target_open, tree
from tests.models.table_runner import TableRunner


def fail_half_way(job: Any) -> Any:
    """As a pass that fails when it has taken slots already."""
    job.state.cache.take(3)
    raise RuntimeError("the device is gone")


async def test_a_pass_that_fails_loses_its_own_batch_and_nothing_else() -> None:
    verifier = Misbehaving(LmVerifier(TableRunner(block_size=8)))  # too short to share a block
    async with target(verifier) as service:
        stream, other = service.stream(), service.stream()
        await stream.send(opens=[target_open(s) for s in (1, 2, 3)])
        await other.send(opens=[target_open(1)])
        for each, s in ((stream, 1), (stream, 2), (stream, 3), (other, 1)):
            await each.answer(s)
        slots = (await service.load()).kv_slots_used
        verifier.instead = fail_half_way
        await stream.send(rounds=[round_(1, 1, 4), round_(2, 1, 4, tree([1, 2, 3]))])
        for s in (1, 2):
            error = await stream.error(s)
            assert type(error) is PassFailed
        verifier.instead = lambda _: MODELS_OWN
        load = await service.load()
        assert load.live_sequences == 2
        assert load.kv_slots_used == slots // 2
        # Entries for the lost are dropped in silence; the bystanders go on; new ones are welcome.
        await stream.send(rounds=[round_(1, 2, 5), round_(3, 1, 4)], opens=[target_open(4)])
        await other.send(rounds=[round_(1, 1, 4)])
        assert (await stream.answer(3)).round == 1
        assert (await stream.answer(4)).base == 3
        assert (await other.answer(1)).round == 1
        assert stream.unread(1) == 0
        await stream.send(closes=[3, 4])
        await other.send(closes=[1])
        await service.nothing_left(open_streams=2)


async def test_a_draft_pass_that_fails_loses_its_own_batch_and_no_answer() -> None:
    drafter = Misbehaving(LanguageModelDrafter(TableRunner(context_length=16)))
    async with draft(drafter) as service:
        stream = service.stream()
        # 2 stands at the end of the draft's context: its advances are answered without a pass.
        await stream.send(opens=[draft_open(1, max_nodes=1), draft_open(2, token_ids=[1] * 17)])
        await asyncio.gather(stream.answer(1), stream.answer(2))
        drafter.error = RuntimeError("the device is gone")
        await stream.send(advances=[advance(2, 1, 17), advance(1, 1, 4, [1])])
        assert type(await stream.error(1)) is PassFailed
        assert (await stream.answer(2)).end == draft_pb2.GROWTH_END_CONTEXT
        drafter.error = None
        await stream.send(advances=[advance(2, 2, 17)], opens=[draft_open(3, max_nodes=3)])
        assert (await stream.answer(2)).end == draft_pb2.GROWTH_END_CONTEXT
        assert len((await stream.answer(3)).tree.token_ids) == 3


@pytest.mark.parametrize("verb", ["open", "close"])
async def test_a_model_that_fails_outside_a_pass_loses_that_sequence_alone(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    verifier = LmVerifier(TableRunner())
    own = getattr(verifier, verb)

    def failing(argument: Any) -> Any:
        if verb == "close":
            own(argument)
        raise RuntimeError("no memory")

    async with target(verifier) as service:
        stream = service.stream()
        await stream.ask(target_open(1))
        with monkeypatch.context() as patch:
            patch.setattr(verifier, verb, failing)
            await stream.send(opens=[target_open(2)])
            if verb == "open":
                assert type(await stream.error(2)) is PassFailed
            else:
                await stream.answer(2)
                await stream.send(closes=[2])
            assert (await stream.ask(round_(1, 1, 4))).round == 1
        await stream.send(closes=[1])
        await service.nothing_left(open_streams=1)
