"""What both model services refuse alike; they serve as before afterwards."""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.core.errors import InvalidArgument, ModelMismatch, SpecdecError
from specdec.transport import rpc
from specdec.v1 import common_pb2, draft_pb2, generation_pb2, target_pb2
from target_service.language_model import LmVerifier
from tests.contract.bad import NAN, UNSUPPORTED, assert_violation, runner, scribble
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
)

BAD_SPECS: list[tuple[str, common_pb2.SequenceSpec]] = [
    ("spec.token_ids", spec(())),
    ("spec.token_ids", spec((1, 8))),
    ("spec.token_ids", spec((2**32 - 1,))),
    ("spec.num_prompt_tokens", spec((1, 2), num_prompt_tokens=3)),
    ("spec.method", spec(method=0)),
    ("spec.method", spec(method=4)),
    ("spec.sampling.temperature", spec(temperature=NAN)),
    ("spec.sampling.temperature", spec(temperature=-1)),
    ("spec.sampling.temperature", spec(temperature=1e-200)),
    ("spec.sampling.top_p", spec(top_p=0)),
    ("spec.sampling.top_p", spec(top_p=NAN)),
    ("spec.sampling.min_p", spec(sampling=common_pb2.SamplingParams(temperature=1, top_p=1, min_p=2))),
]


async def test_a_malformed_open_is_refused_by_field_and_disturbs_no_other() -> None:
    async with target(LmVerifier(runner())) as targets, draft(LanguageModelDrafter(runner())) as drafts:
        stream, other = targets.stream(), drafts.stream()
        await stream.send(opens=[target_open(1)])
        await stream.answer(1)
        for sequence, (field, bad) in enumerate(BAD_SPECS, 2):
            await stream.send(opens=[target_open(sequence, spec=bad)])
            await other.send(opens=[draft_open(sequence, spec=bad)])
            for each in (stream, other):
                await assert_violation(each, sequence, field)
        await stream.send(opens=[target_open(91, stop_token_ids=[8])])
        await assert_violation(stream, 91, "stop_token_ids")
        await stream.send(rounds=[round_(1, 1, 4)])
        assert (await stream.answer(1)).round == 1
        await drafts.nothing_left(open_streams=1)


@pytest.mark.parametrize("which", [target, draft])
async def test_bytes_that_are_no_frame_end_the_stream_as_the_callers_fault(which: Any) -> None:
    model = LmVerifier(runner()) if which is target else LanguageModelDrafter(runner())
    async with which(model) as service:
        method = "TargetService/Verify" if which is target else "DraftService/Draft"
        opens = {"opens": [(target_open if which is target else draft_open)(1)]}
        call = service.channel.stream_stream(f"/specdec.v1.{method}")()
        await call.write(service.request(**opens).SerializeToString())
        await call.read()
        await call.write(b"\xff\xff\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(_read_to_the_end(call), PATIENCE_S)
        assert isinstance(rpc.error_of(raised.value), InvalidArgument)
        await service.nothing_left()


async def _read_to_the_end(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_another_model_digest_is_a_failed_precondition_that_names_both() -> None:
    async with target(LmVerifier(runner(seed=4))) as targets, draft(LanguageModelDrafter(runner(seed=5))) as drafts:
        for service, opens in ((targets, target_open), (drafts, draft_open)):
            stream = service.stream()
            await stream.send(opens=[opens(1, model_digest="cafe")])
            error = await stream.error(1)
            assert isinstance(error, ModelMismatch)
            mine = service.server.servicer.info.model_digest
            assert re.search(r"\bcafe\b", str(error))
            assert mine in str(error)
            await stream.send(opens=[opens(2, model_digest=mine)])
            assert not isinstance(await stream.answer(2), SpecdecError)


@pytest.mark.parametrize("which", [target, draft])
async def test_entries_for_ended_sequences_are_dropped_in_silence(which: Any) -> None:
    is_target = which is target
    model = LmVerifier(runner()) if is_target else LanguageModelDrafter(runner())
    async with which(model) as service:
        stream = service.stream()
        opens = target_open if is_target else draft_open
        entry = (lambda s: {"rounds": [round_(s, 1, 4)]}) if is_target else (lambda s: {"advances": [advance(s, 9, 9)]})
        await stream.send(opens=[opens(1), opens(2, spec=spec([99])), opens(3)])
        for s in (1, 2, 3):
            await stream.answer(s)
        await stream.send(closes=[1, 1, 77])  # idempotent, also for what never was
        for s in (1, 2):
            await stream.send(**entry(s))
        await stream.send(opens=[opens(4)])
        await stream.answer(4)
        assert (stream.unread(1), stream.unread(2)) == (0, 0)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("which", [target, draft])
async def test_no_frame_breaks_a_model_service(which: Any, seed: int) -> None:
    random_ = random.Random(seed)
    is_target = which is target
    table = runner(num_slots=600)
    model = LmVerifier(table) if is_target else LanguageModelDrafter(table)
    opens = target_open if is_target else draft_open
    async with which(model) as service:
        honest = service.stream()
        await honest.send(opens=[opens(1, seed=3)])
        before = await honest.answer(1)
        num_answers, num_errors = 0, 0
        for _ in range(8):
            stream = service.stream()
            number = 0
            for _ in range(20):
                frame = scribble(random_, service.request())
                # Numbers rise as they must, mostly; else nothing would ever be opened.
                for message in frame.opens:
                    number += random_.random() < 0.9
                    message.sequence = number
                    if random_.random() < 0.6:
                        message.spec.CopyFrom(spec(method=random_.choice([COUPLED, TOKEN, BLOCK])))
                    if random_.random() < 0.8:
                        message.more = False
                for message in frame.rounds if is_target else frame.advances:
                    if random_.random() < 0.5:
                        message.base = 4 if is_target else 3 + len(message.token_ids)
                        message.number = 1
                await stream._call.write(frame)
            await stream.half_close()
            assert await stream.status() is grpc.StatusCode.OK
            num_answers += sum(len(f.verdicts if is_target else f.growths) for f in stream.frames)
            num_errors += sum(len(f.errors) for f in stream.frames)
        assert num_answers > 20, "the frames are not all nonsense"
        assert num_errors > 20
        await honest.send(opens=[opens(2, seed=3)])
        after = await honest.answer(2)
        if is_target:
            assert (after.base, after.next_token) == (before.base, before.next_token)
        await honest.send(closes=[1, 2])
        await service.nothing_left(open_streams=1)


@pytest.mark.parametrize("kind", [target_pb2.VerifyRequest, draft_pb2.DraftRequest, generation_pb2.GenerateRequest])
def test_every_field_of_the_contract_is_scribbled_in(kind: type[Message]) -> None:
    filled: set[str] = set()
    for seed in range(3000):
        filled |= set(_filled(scribble(random.Random(seed), kind())))
    assert filled >= set(_fields(kind.DESCRIPTOR))


def _fields(descriptor: Descriptor) -> Iterator[str]:
    for field in descriptor.fields:
        if field.name not in UNSUPPORTED:
            yield field.full_name
            if field.message_type is not None:
                yield from _fields(field.message_type)


def _filled(message: Message) -> Iterator[str]:
    for field, value in message.ListFields():
        yield field.full_name
        if field.message_type is not None:
            each_entry = field.message_type.GetOptions().map_entry
            yield from (f"{field.message_type.full_name}.{name}" for name in ("key", "value") if each_entry)
            for each in value.values() if each_entry else value if field.is_repeated else (value,):
                if isinstance(each, Message):
                    yield from _filled(each)
