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
from testing.bad_input import attack, disturb
from testing.raw import (
    PATIENCE_S,
    advance,
    draft,
    draft_open,
    round_,
    spec,
    target,
    target_open,
)
from tests.contract.bad import NAN, assert_violation, runner

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
        await stream.ask(target_open(1))
        for sequence, (field, bad) in enumerate(BAD_SPECS, 2):
            await stream.send(opens=[target_open(sequence, spec=bad)])
            await other.send(opens=[draft_open(sequence, spec=bad)])
            for each in (stream, other):
                await assert_violation(each, sequence, field)
        await stream.send(opens=[target_open(91, stop_token_ids=[8])])
        await assert_violation(stream, 91, "stop_token_ids")
        assert (await stream.ask(round_(1, 1, 4))).round == 1
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
            assert not isinstance(await stream.ask(opens(2, model_digest=mine)), SpecdecError)


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
        await stream.ask(opens(4))
        assert (stream.unread(1), stream.unread(2)) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("which", [target, draft])
async def test_no_frame_breaks_a_model_service(which: Any, seed: int) -> None:
    is_target = which is target
    table = runner(num_slots=600)
    opens = target_open if is_target else draft_open
    async with which(LmVerifier(table) if is_target else LanguageModelDrafter(table)) as service:
        honest = service.stream()
        before = await honest.ask(opens(1, seed=3))
        address, role = f"127.0.0.1:{service.server.port}", "target" if is_target else "draft"
        statuses = await attack(role, address, 1000, random.Random(seed))
        assert statuses["OK"] > 20, "the frames are not all nonsense"
        assert statuses["INVALID_ARGUMENT"] > 20
        faults = {"INTERNAL", "UNKNOWN", "UNAVAILABLE", "DEADLINE_EXCEEDED", "INVALID_ARGUMENT without a field"}
        assert not faults & statuses.keys(), statuses
        after = await honest.ask(opens(2, seed=3))
        if is_target:
            assert (after.base, after.next_token) == (before.base, before.next_token)
        await honest.send(closes=[1, 2])
        await service.nothing_left(open_streams=1)


@pytest.mark.parametrize("kind", [target_pb2.VerifyRequest, draft_pb2.DraftRequest, generation_pb2.GenerateRequest])
def test_every_field_of_the_contract_is_disturbed(kind: type[Message]) -> None:
    chance, filled = random.Random(1), set()
    for _ in range(500):
        message = kind()
        for _ in range(20):
            disturb(message, chance)
        filled |= set(_filled(message))
    assert filled >= set(_fields(kind.DESCRIPTOR))


def _fields(descriptor: Descriptor) -> Iterator[str]:
    for field in descriptor.fields:
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
