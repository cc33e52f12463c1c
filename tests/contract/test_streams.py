"""The life of sequences inside a stream, frame by frame, against the model services alone."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.errors import ContextExceeded, Draining, InvalidArgument, OutOfStep, PassFailed
from specdec.v1 import draft_pb2
from target_service.engine import Job
from target_service.lm_verifier import LmVerifier
from tests.contract.raw import (
    BLOCK,
    COUPLED,
    PATIENCE_S,
    TOKEN,
    advance,
    draft,
    draft_open,
    round_,
    spec,
    target,
    target_open,
    tree,
)
from tests.table_model import TableRunner

GREEDY = dict(temperature=0.0)


class GatedVerifier(LmVerifier):
    """Passes wait while the gate is closed, and fail while told to."""

    def __init__(self, runner: TableRunner) -> None:
        super().__init__(runner)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.raises = False

    def verify(self, jobs: Sequence[Job]) -> Any:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        if self.raises:
            self._runner.forward([])
            for job in jobs:
                job.memory.cache.take(3)  # a pass that fails has taken slots already
            raise RuntimeError("the device is gone")
        return super().verify(jobs)

    async def in_a_pass(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, PATIENCE_S)


def greedy_text(runner: TableRunner, prefix: Sequence[int], length: int) -> list[int]:
    """What the model itself says."""
    ids = list(prefix)
    for _ in range(length):
        ids.append(int(runner.logits_after(ids).argmax()))
    return ids[len(prefix) :]


# --- opens ---


@pytest.mark.parametrize("chunks", [(1, 2, 3, 4, 5), (5,), (2, 3)])
async def test_an_open_in_chunks_is_the_open_in_one(chunks: tuple[int, ...]) -> None:
    ids = [(7 * i) % 8 for i in range(sum(chunks))]
    async with target(LmVerifier(TableRunner())) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, token_ids=ids, seed=5)])
        whole = await stream.answer(1)
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
            assert (await stream.answer(s)).next_token == greedy_text(runner, [s, s + 1, s + 2], 1)[0]


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


# --- half-closing ---


async def test_half_closing_answers_what_is_unanswered_and_then_ends() -> None:
    verifier = GatedVerifier(TableRunner())
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


# --- heartbeats ---


async def test_a_long_pass_is_accompanied_by_progress_of_what_waits() -> None:
    verifier = GatedVerifier(TableRunner())
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
    class Slow(LanguageModelDrafter):
        gate = threading.Event()

        def grow(self, sequences: Any) -> Any:
            assert self.gate.wait(PATIENCE_S)
            return super().grow(sequences)

    drafter = Slow(TableRunner())
    async with draft(drafter) as service:
        stream = service.stream()
        await stream.send(opens=[draft_open(1, max_nodes=1)])
        beat = await stream.frame_where(lambda frame: not frame.growths)
        assert beat.load.live_sequences == 1
        drafter.gate.set()
        assert len((await stream.answer(1)).tree.token_ids) == 1


# --- run-on and older bases ---


async def run_on_to(stream: Any, runner: TableRunner, allowance: int, **fields: Any) -> list[Any]:
    """Open sequence 1, allow ``allowance`` plain tokens after round 1; all verdicts of round 1."""
    await stream.send(opens=[target_open(1, **GREEDY, **fields)])
    await stream.answer(1)
    await stream.send(rounds=[round_(1, 1, 4, run_on=allowance)])
    return [await stream.answer(1) for _ in range(allowance + 1)]


async def test_run_on_gives_the_plain_text_up_to_its_allowance() -> None:
    runner = TableRunner()
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        verdicts = await run_on_to(stream, runner, 6)
        assert [(v.round, v.base, list(v.accepted)) for v in verdicts] == [(1, 4 + i, []) for i in range(7)]
        assert [v.next_token for v in verdicts] == greedy_text(runner, [1, 2, 3], 8)[1:]
        # Allowance spent: the service rests, and the next round finds it there.
        passes = (await service.load()).passes
        await stream.send(rounds=[round_(1, 2, 11)])
        assert ((await stream.answer(1)).base, (await service.load()).passes) == (11, passes + 1)


async def test_run_on_stops_at_a_stop_token() -> None:
    runner = TableRunner(seed=3)
    text = greedy_text(runner, [1, 2, 3], 60)
    stop = next(token for token in text[2:] if token not in text[:2])
    at = text.index(stop)
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, stop_token_ids=[stop], **GREEDY)])
        await stream.answer(1)
        await stream.send(rounds=[round_(1, 1, 4, run_on=50)])
        got = [(await stream.answer(1)).next_token for _ in range(at)]
        assert got == text[1 : at + 1]
        await stream.half_close()
        assert await stream.status() is grpc.StatusCode.OK
        assert stream.unread(1) == 0
        assert (await service.load()).passes == at + 1


async def test_run_on_stops_at_the_end_of_the_context_and_more_is_out_of_range() -> None:
    runner = TableRunner(context_length=12)
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, **GREEDY)])
        await stream.answer(1)
        await stream.send(rounds=[round_(1, 1, 4, run_on=1000)])
        verdicts = [await stream.answer(1) for _ in range(8)]
        assert verdicts[-1].base == 11  # its token is the 12th
        await stream.send(rounds=[round_(1, 2, 12)])
        error = await stream.error(1)
        assert isinstance(error, ContextExceeded)
        assert "12" in str(error)


async def test_a_round_with_an_older_base_is_walked_along_and_the_rest_is_verified() -> None:
    runner = TableRunner()
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await run_on_to(stream, runner, 3)
        text = greedy_text(runner, [1, 2, 3], 20)  # base 8 now, text[:5] is committed
        # Hangs from base 5: three tokens are known by now, two are new and right, the last is wrong.
        wrong = (text[7] + 1) % 8
        await stream.send(rounds=[round_(1, 2, 5, tree([*text[2:7], wrong]))])
        verdict = await stream.answer(1)
        assert (verdict.round, verdict.base, list(verdict.accepted)) == (2, 8, [3, 4])
        assert verdict.next_token == text[7]


async def test_a_round_with_an_older_base_that_mismatches_verifies_nothing() -> None:
    runner = TableRunner()
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await run_on_to(stream, runner, 3)
        text = greedy_text(runner, [1, 2, 3], 20)
        ids = [text[2], (text[3] + 1) % 8, text[4], text[5], text[6]]
        await stream.send(rounds=[round_(1, 2, 5, tree(ids))])
        verdict = await stream.answer(1)
        assert (verdict.base, list(verdict.accepted), verdict.next_token) == (8, [], text[5])


async def test_an_older_tree_that_ends_before_the_current_base_verifies_nothing() -> None:
    runner = TableRunner()
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await run_on_to(stream, runner, 3)
        text = greedy_text(runner, [1, 2, 3], 20)
        for number, ids in ((2, text[2:4]), (3, text[2:5])):
            await stream.send(rounds=[round_(1, number, 5, tree(ids))])
            verdict = await stream.answer(1)
            assert (verdict.base, list(verdict.accepted), verdict.next_token) == (6 + number, [], text[3 + number])


async def test_a_round_may_overtake_a_run_on() -> None:
    """Whatever the target produced meanwhile, the text is one and the numbers add up."""
    runner = TableRunner()
    text = greedy_text(runner, [1, 2, 3], 400)
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, **GREEDY)])
        base, committed = 4, [(await stream.answer(1)).next_token]
        for number in range(1, 12):
            await stream.send(rounds=[round_(1, number, base, tree(text[base - 3 : base + 1]), run_on=20)])
            while True:
                verdict = await stream.answer(1)
                assert verdict.base == base
                assert verdict.round in (number - 1, number)
                accepted = text[base - 3 : base - 3 + len(verdict.accepted)]
                committed += [*accepted, verdict.next_token]
                base += len(verdict.accepted) + 1
                if verdict.round == number:
                    break
        assert committed == text[: len(committed)]


@pytest.mark.parametrize("method", [TOKEN, BLOCK])
async def test_with_distributions_a_run_on_is_ended_by_an_empty_round(method: int) -> None:
    async with target(LmVerifier(TableRunner())) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, method=method)])
        await stream.answer(1)
        await stream.send(rounds=[round_(1, 1, 4, run_on=3)])
        for _ in range(4):
            verdict = await stream.answer(1)
        await stream.send(rounds=[round_(1, 2, 5)])  # empty: an older base is no harm
        verdict = await stream.answer(1)
        assert (verdict.round, verdict.base) == (2, 8)
        await stream.send(rounds=[round_(1, 3, 9, tree([1, 2]))])
        assert (await stream.answer(1)).base == 9
        await stream.send(rounds=[round_(1, 4, 4, tree([1, 2]))])
        error = await stream.error(1)
        assert isinstance(error, OutOfStep)
        assert "base" in str(error)


async def test_predictions_are_the_targets_own_token_at_every_node() -> None:
    runner = TableRunner()
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, return_predictions=True, **GREEDY)])
        first = await stream.answer(1)
        await stream.send(rounds=[round_(1, 1, 4, tree([0, 1, 2, 3], [-1, -1, 0, 2]))])
        verdict = await stream.answer(1)
        root = [1, 2, 3, first.next_token]
        paths = [root, [*root, 0], [*root, 1], [*root, 0, 2], [*root, 0, 2, 3]]
        assert list(verdict.predictions) == [greedy_text(runner, path, 1)[0] for path in paths]


# --- failures of a pass ---


async def test_a_pass_that_fails_loses_its_own_batch_and_nothing_else() -> None:
    verifier = GatedVerifier(TableRunner(block_size=8))  # too short to share a block
    async with target(verifier) as service:
        stream, other = service.stream(), service.stream()
        await stream.send(opens=[target_open(s) for s in (1, 2, 3)])
        await other.send(opens=[target_open(1)])
        for each, s in ((stream, 1), (stream, 2), (stream, 3), (other, 1)):
            await each.answer(s)
        slots = (await service.load()).kv_slots_used
        verifier.raises = True
        await stream.send(rounds=[round_(1, 1, 4), round_(2, 1, 4, tree([1, 2, 3]))])
        for s in (1, 2):
            error = await stream.error(s)
            assert type(error) is PassFailed
        verifier.raises = False
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
    class Failing(LanguageModelDrafter):
        raises = False

        def grow(self, sequences: Any) -> Any:
            if self.raises:
                raise RuntimeError("the device is gone")
            return super().grow(sequences)

    drafter = Failing(TableRunner(context_length=16))
    async with draft(drafter) as service:
        stream = service.stream()
        # 2 stands at the end of the draft's context: its advances are answered without a pass.
        await stream.send(opens=[draft_open(1, max_nodes=1), draft_open(2, token_ids=[1] * 17)])
        await asyncio.gather(stream.answer(1), stream.answer(2))
        drafter.raises = True
        await stream.send(advances=[advance(2, 1, 17), advance(1, 1, 4, [1])])
        assert type(await stream.error(1)) is PassFailed
        assert (await stream.answer(2)).end == draft_pb2.GROWTH_END_CONTEXT
        drafter.raises = False
        await stream.send(advances=[advance(2, 2, 17)], opens=[draft_open(3, max_nodes=3)])
        assert (await stream.answer(2)).end == draft_pb2.GROWTH_END_CONTEXT
        assert len((await stream.answer(3)).tree.token_ids) == 3


@pytest.mark.parametrize("verb", ["open", "close"])
async def test_a_model_that_fails_outside_a_pass_loses_that_sequence_alone(verb: str) -> None:
    class Failing(LmVerifier):
        raises = False

        def open(self, spec: Any) -> Any:
            if self.raises and verb == "open":
                raise RuntimeError("no memory")
            return super().open(spec)

        def close(self, memory: Any) -> None:
            super().close(memory)
            if self.raises and verb == "close":
                raise RuntimeError("no memory")

    verifier = Failing(TableRunner())
    async with target(verifier) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1)])
        await stream.answer(1)
        verifier.raises = True
        if verb == "open":
            await stream.send(opens=[target_open(2)])
            assert type(await stream.error(2)) is PassFailed
        else:
            await stream.send(opens=[target_open(2)])
            await stream.answer(2)
            await stream.send(closes=[2])
        await stream.send(rounds=[round_(1, 1, 4)])
        assert (await stream.answer(1)).round == 1
        verifier.raises = False
        await stream.send(closes=[1])
        await service.nothing_left(open_streams=1)


# --- draft streams ---


async def test_a_newer_advance_supersedes_an_older_one_and_their_news_is_merged() -> None:
    class Gated(LanguageModelDrafter):
        gate = threading.Event()
        entered = threading.Event()

        def grow(self, sequences: Any) -> Any:
            self.entered.set()
            assert self.gate.wait(PATIENCE_S)
            return super().grow(sequences)

    runner = TableRunner()
    drafter = Gated(runner)
    text = greedy_text(runner, [1, 2, 3], 20)
    async with draft(drafter) as service:
        stream = service.stream()
        await stream.send(opens=[draft_open(1, max_nodes=8, **GREEDY)])
        assert await asyncio.to_thread(drafter.entered.wait, PATIENCE_S)
        await stream.send(advances=[advance(1, 1, 5, text[:2], max_nodes=8)])
        await stream.send(advances=[advance(1, 2, 6, text[2:3], max_nodes=4)])
        # The frames reach the model thread while it is in the pass: ask the loop, not the clock.
        async with asyncio.timeout(PATIENCE_S):
            while service.server.servicer.streams._loop._inbox.qsize() < 2:
                await asyncio.sleep(0.01)
        drafter.gate.set()
        answers = [await stream.answer(1) for _ in range(3)]
        assert [(a.advance, a.end) for a in answers] == [
            (0, draft_pb2.GROWTH_END_SUPERSEDED),
            (1, draft_pb2.GROWTH_END_SUPERSEDED),
            (2, draft_pb2.GROWTH_END_BUDGET),
        ]
        assert answers[2].base == 6
        assert list(answers[2].tree.token_ids) == text[3:7]


@pytest.mark.parametrize("method", [TOKEN, BLOCK])
async def test_a_chain_with_distributions_is_drawn_afresh_at_every_advance(method: int) -> None:
    async with draft(LanguageModelDrafter(TableRunner())) as service:
        stream = service.stream()
        await stream.send(opens=[draft_open(1, method=method)])
        await stream.answer(1)
        await stream.send(advances=[advance(1, 1, 4, [5], max_nodes=4)])
        chain = await stream.answer(1)
        assert (len(chain.tree.token_ids), len(chain.tree.draft_probs)) == (4, 4)
        await stream.send(advances=[advance(1, 2, 5, chain.tree.token_ids[:1], max_nodes=4)])
        again = await stream.answer(1)
        assert (again.base, len(again.tree.token_ids)) == (5, 4)


async def test_a_coupled_tree_keeps_what_is_below_the_committed_tokens() -> None:
    runner = TableRunner()
    async with draft(LanguageModelDrafter(runner)) as service:
        stream = service.stream()
        await stream.send(opens=[draft_open(1, max_nodes=6, seed=3)])
        grown = list((await stream.answer(1)).tree.token_ids)
        passes = runner.num_passes
        await stream.send(advances=[advance(1, 1, 5, grown[:2], max_nodes=0)])
        assert list((await stream.answer(1)).tree.token_ids) == grown[2:]
        assert runner.num_passes == passes


async def test_a_draft_stops_at_its_own_context() -> None:
    async with draft(LanguageModelDrafter(TableRunner(context_length=8))) as service:
        stream = service.stream()
        await stream.send(opens=[draft_open(1, max_nodes=30)])
        growth = await stream.answer(1)
        assert (len(growth.tree.token_ids), growth.end) == (6, draft_pb2.GROWTH_END_CONTEXT)  # 8 fed, 1 more known
        await stream.send(opens=[draft_open(2, token_ids=[1] * 20, max_nodes=3)])
        assert (await stream.answer(2)).end == draft_pb2.GROWTH_END_CONTEXT


# --- draining ---


async def test_draining_ends_sequences_at_their_rounds_end_and_refuses_opens() -> None:
    verifier = GatedVerifier(TableRunner())
    async with target(verifier) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1), target_open(2)])
        await asyncio.gather(stream.answer(1), stream.answer(2))
        verifier.gate.clear()
        verifier.entered.clear()
        await stream.send(rounds=[round_(1, 1, 4)])
        await verifier.in_a_pass()
        stopping = asyncio.create_task(service.server.stop(PATIENCE_S))
        await stream.send(opens=[target_open(3)])
        async with asyncio.timeout(PATIENCE_S):
            while service.server.servicer.streams._loop._inbox.qsize() < 2:
                await asyncio.sleep(0.01)
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


async def test_a_bad_entry_in_a_frame_leaves_the_other_entries_standing() -> None:
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
        await stream.send(opens=[target_open(10, method=COUPLED)])
        assert (await stream.answer(10)).base == 3


# --- health ---


async def test_health_can_be_watched_until_the_service_drains() -> None:
    async with target(LmVerifier(TableRunner())) as service:
        watch = health_pb2_grpc.HealthStub(service.channel).Watch(
            health_pb2.HealthCheckRequest(service="specdec.v1.TargetService")
        )
        status = health_pb2.HealthCheckResponse
        assert (await asyncio.wait_for(watch.read(), PATIENCE_S)).status == status.SERVING
        stopping = asyncio.create_task(service.server.stop(PATIENCE_S))
        assert (await asyncio.wait_for(watch.read(), PATIENCE_S)).status == status.NOT_SERVING
        await stopping
