"""The life of sequences inside a stream, frame by frame, against the model services alone."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator

import grpc
import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.core.errors import InvalidArgument, OutOfStep
from specdec.v1 import draft_pb2
from target_service.language_model import LmVerifier
from testing.misbehaving import Misbehaving
from testing.raw import COUPLED, GREEDY, draft, draft_open, round_, spec, target, target_open
from tests.models.table_runner import TableRunner


@pytest.mark.parametrize("chunks", [(1, 2, 3, 4, 5), (5,), (2, 3)])
async def test_an_open_in_chunks_is_the_open_in_one(chunks: tuple[int, ...]) -> None:
    ids = [(7 * i) % 8 for i in range(sum(chunks))]
    async with target(LmVerifier(TableRunner())) as service:
        stream = service.stream()
        whole = await stream.ask(target_open(1, token_ids=ids, seed=5))
        start = 0
        for index, size in enumerate(chunks):
            part, start = ids[start : start + size], start + size
            fields = dict(num_prompt_tokens=len(ids), seed=5) if index == 0 else dict(num_prompt_tokens=0)
            await stream.send(opens=[target_open(2, token_ids=part, more=start < len(ids), **fields)])
        chunked = await stream.answer(2)
        assert (chunked.base, chunked.next_token) == (whole.base, whole.next_token) == (len(ids), whole.next_token)


async def test_chunks_of_two_sequences_may_interleave_in_frames() -> None:
    runner = TableRunner()
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        first = [target_open(s, token_ids=[s], num_prompt_tokens=3, more=True, **GREEDY) for s in (1, 2)]
        second = [target_open(s, token_ids=[s + 1, s + 2], num_prompt_tokens=0) for s in (2, 1)]
        await stream.send(opens=[*first, *second])
        for s in (1, 2):
            assert (await stream.answer(s)).next_token == runner.greedy_text([s, s + 1, s + 2], 1)[0]


async def test_a_round_in_the_middle_of_a_chunked_open_is_out_of_step() -> None:
    async with target(LmVerifier(TableRunner())) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, more=True)], rounds=[round_(1, 1, 3)])
        error = await stream.error(1)
        assert isinstance(error, OutOfStep)
        assert "rest of its open" in str(error)


@pytest.fixture
def hasty_threads() -> Iterator[None]:
    """The model thread gets its turn at once, not when the event loop rests."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("hasty_threads")
async def test_many_sequences_in_a_frame_are_one_pass_and_one_frame() -> None:
    runner = TableRunner(num_slots=200_000, context_length=4096, block_size=8)
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(s, token_ids=[s % 8] * 5) for s in range(1, 97)])
        await asyncio.gather(*(stream.answer(s) for s in range(1, 97)))
        assert runner.num_passes == 1
        assert sum(bool(frame.verdicts) for frame in stream.frames) == 1


async def test_an_open_and_its_close_in_one_frame_leave_nothing() -> None:
    async with target(LmVerifier(TableRunner())) as service, draft(LanguageModelDrafter(TableRunner())) as drafts:
        for each, opens in ((service, target_open(1)), (drafts, draft_open(1, max_nodes=4))):
            stream = each.stream()
            await stream.send(opens=[opens], closes=[1])
            await stream.half_close()
            assert await stream.status() is grpc.StatusCode.OK
            assert stream.unread(1) == 0
            await each.nothing_left()


async def test_a_close_half_way_through_a_chunked_open_leaves_nothing() -> None:
    async with target(LmVerifier(TableRunner())) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, more=True)], closes=[1])
        await stream.half_close()
        assert await stream.status() is grpc.StatusCode.OK


async def test_half_closing_answers_what_is_unanswered_and_then_ends() -> None:
    verifier = Misbehaving(LmVerifier(TableRunner()))
    async with target(verifier) as service:
        verifier.gate.clear()
        stream = service.stream()
        await stream.send(opens=[target_open(s) for s in (1, 2, 3)])
        await stream.half_close()
        await verifier.in_a_pass()
        verifier.gate.set()
        assert await stream.status() is grpc.StatusCode.OK
        assert [stream.unread(s) for s in (1, 2, 3)] == [1, 1, 1]
        await service.nothing_left()


async def test_half_closing_a_draft_stream_answers_what_is_unanswered_and_then_ends() -> None:
    async with draft(LanguageModelDrafter(TableRunner())) as service:
        stream = service.stream()
        await stream.send(opens=[draft_open(1, max_nodes=5)])
        await stream.half_close()
        assert await stream.status() is grpc.StatusCode.OK
        growth = await stream.answer(1)
        assert (len(growth.tree.token_ids), growth.end) == (5, draft_pb2.GROWTH_END_BUDGET)
        await service.nothing_left()


async def test_half_closing_amid_a_chunked_open_ends_the_stream_and_says_why() -> None:
    async with target(LmVerifier(TableRunner())) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1), target_open(2, more=True)])
        await stream.half_close()
        assert await stream.status() is grpc.StatusCode.OK
        assert (await stream.answer(1)).base == 3
        assert isinstance(await stream.error(2), OutOfStep)
        await service.nothing_left()


async def test_a_service_that_stops_in_a_pass_leaves_nothing_in_its_model() -> None:
    verifier = Misbehaving(LmVerifier(runner := TableRunner()))
    async with target(verifier) as service:
        stream = service.stream()
        await stream.ask(target_open(1))
        verifier.gate.clear()
        await stream.send(rounds=[round_(1, 1, 4)], opens=[target_open(2)])
        await verifier.in_a_pass()
        asyncio.get_running_loop().call_later(0.2, verifier.gate.set)  # while it stops
    assert runner.pool.num_used == 0


async def test_a_long_pass_is_accompanied_by_progress_of_what_waits() -> None:
    verifier = Misbehaving(LmVerifier(TableRunner()))
    async with target(verifier) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1), target_open(2)])
        await asyncio.gather(stream.answer(1), stream.answer(2))
        assert not any(frame.progress for frame in stream.frames)
        verifier.gate.clear()
        await stream.send(rounds=[round_(1, 1, 4)])  # 2 waits for nothing
        beats = [await stream.frame_where(lambda frame: frame.progress) for _ in range(2)]
        assert {beat.sequence for frame in beats for beat in frame.progress} == {1}
        verifier.gate.set()
        assert (await stream.answer(1)).round == 1


async def test_a_draft_that_takes_long_says_that_it_lives() -> None:
    drafter = Misbehaving(LanguageModelDrafter(TableRunner()), closes_at=1)
    async with draft(drafter) as service:
        stream = service.stream()
        await stream.send(opens=[draft_open(1, max_nodes=1)])
        beat = await stream.frame_where(lambda frame: not frame.growths)
        assert beat.load.live_sequences == 1
        drafter.gate.set()
        assert len((await stream.answer(1)).tree.token_ids) == 1


async def test_a_bad_entry_in_a_frame_does_not_affect_the_others() -> None:
    async with target(LmVerifier(TableRunner())) as service:
        stream = service.stream()
        await stream.send(
            opens=[target_open(1), target_open(2, spec=spec([99])), target_open(3, method=77), target_open(4)],
            rounds=[round_(9, 1, 4)],
            closes=[12],
        )
        assert (await stream.answer(1)).base == (await stream.answer(4)).base == 3
        assert type(await stream.error(2)) is type(await stream.error(3)) is InvalidArgument
        assert type(await stream.error(9)) is OutOfStep
        assert (await stream.ask(target_open(10, method=COUPLED))).base == 3
