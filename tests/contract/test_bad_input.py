"""Every row of the status table, provoked over gRPC; the service serves as before afterwards."""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import re
import struct
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from tokenizers import Tokenizer, models, pre_tokenizers

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec import rpc
from specdec.errors import (
    ContextExceeded,
    DeadlineExceeded,
    InvalidArgument,
    ModelMismatch,
    NoReplica,
    OutOfStep,
    Overloaded,
    Preempted,
    ReplicaLost,
    SpecdecError,
)
from specdec.v1 import common_pb2, draft_pb2, generation_pb2, generation_pb2_grpc, target_pb2
from target_service.lm_verifier import LmVerifier
from tests.cluster import Cluster, cluster
from tests.contract.raw import (
    BLOCK,
    COUPLED,
    PATIENCE_S,
    TOKEN,
    Raw,
    advance,
    draft,
    draft_open,
    orchestrator,
    round_,
    spec,
    target,
    target_open,
    tree,
)
from tests.table_model import TableRunner

NAN, INF = math.nan, math.inf
CONTEXT = 64
IDS = {"token_ids": [1, 2, 3]}


def runner(**fields: Any) -> TableRunner:
    return TableRunner(**{"context_length": CONTEXT, **fields})


@asynccontextmanager
async def deployment(tokenizer: str = "", **settings: Any) -> AsyncIterator[Cluster]:
    drafter = LanguageModelDrafter(runner(blend=(2, 0.3)))
    async with cluster([LmVerifier(runner())], [drafter], tokenizer=tokenizer, **settings) as running:
        expected = await running.client.generate(token_ids=IDS, max_tokens=20, seed=1)
        yield running
        # Whatever was done to it, it serves as before.
        again = await running.client.generate(token_ids=IDS, max_tokens=20, seed=1)
        assert again[0].token_ids == expected[0].token_ids
        await running.settled(PATIENCE_S)


@pytest.fixture
def tokenizer_file(tmp_path: Path) -> str:
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(8)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def generate_request(**fields: Any) -> generation_pb2.GenerateRequest:
    fields = {"max_tokens": 5, **fields}
    if not {"text", "chat", "token_ids"} & fields.keys():
        fields["token_ids"] = IDS
    return generation_pb2.GenerateRequest(**fields)


async def refusal(running: Cluster, message: Message | bytes, timeout_s: float = PATIENCE_S) -> SpecdecError:
    """The error that a request ends with, from its bytes on the wire."""
    data = message if isinstance(message, bytes) else message.SerializeToString()
    async with rpc.channel(f"127.0.0.1:{running.orchestrator.port}") as channel:
        call = channel.unary_stream(
            "/specdec.v1.GenerationService/Generate",
            response_deserializer=generation_pb2.GenerateResponse.FromString,
        )(data, timeout=timeout_s)
        try:
            async for _ in call:
                pass
        except grpc.aio.AioRpcError as error:
            failure = error
        else:
            raise AssertionError("the request was served")
        finally:
            call.cancel()
    assert failure.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), failure
    return rpc.error_of(failure)


# --- the public API: INVALID_ARGUMENT, each field by its name ---

BAD_VALUES: list[tuple[str, dict[str, Any]]] = [
    ("temperature", dict(temperature=-0.5)),
    ("temperature", dict(temperature=NAN)),
    ("temperature", dict(temperature=INF)),
    ("temperature", dict(temperature=1e-9)),
    ("temperature", dict(temperature=1e9)),
    ("top_p", dict(top_p=0.0)),
    ("top_p", dict(top_p=1.01)),
    ("top_p", dict(top_p=NAN)),
    ("min_p", dict(min_p=-0.1)),
    ("min_p", dict(min_p=1.5)),
    ("min_p", dict(min_p=NAN)),
    ("n", dict(n=0)),
    ("n", dict(n=65)),
    ("n", dict(n=2**32 - 1)),
    ("max_tokens", dict(max_tokens=0)),
    ("prompt", dict(token_ids=None)),
    ("token_ids", dict(token_ids={"token_ids": []})),
    ("token_ids", dict(token_ids={"token_ids": [1, 8]})),
    ("token_ids", dict(token_ids={"token_ids": [2**32 - 1]})),
    ("text", dict(text="w1")),  # no tokenizer here
    ("stop", dict(stop=["w1"])),
    ("stop_token_ids", dict(stop_token_ids=[8])),
    ("stop_token_ids", dict(stop_token_ids=[1] * 257)),
    ("verification", dict(verification=99)),
    ("num_draft_tokens", dict(num_draft_tokens=65)),
    ("chat", dict(chat={"messages": [{"role": "user", "content": "hello"}]})),
    ("chat", dict(chat={})),
    ("presence_penalty", dict(presence_penalty=0.5)),
    ("presence_penalty", dict(presence_penalty=0.0)),
    ("frequency_penalty", dict(frequency_penalty=0.5)),
    ("repetition_penalty", dict(repetition_penalty=1.1)),
    ("logit_bias", dict(logit_bias={3: 1.0})),
    ("min_tokens", dict(min_tokens=3)),
    ("logprobs", dict(logprobs=1)),
    ("grammar", dict(grammar="root ::= x")),
    ("seed", dict(resume={0: {"token_ids": [1]}})),
    ("resume[3]", dict(resume={3: {"token_ids": [1]}}, seed=1)),
    ("resume[0]", dict(resume={0: {"token_ids": [99]}}, seed=1)),
    ("resume[0]", dict(resume={0: {"token_ids": [1, 1, 1]}}, seed=1, max_tokens=2)),
]


async def test_a_bad_value_is_refused_by_the_name_of_its_field() -> None:
    async with deployment() as running:
        for field, values in BAD_VALUES:
            error = await refusal(running, generate_request(**values))
            assert isinstance(error, InvalidArgument), (values, error)
            assert [name for name, _ in error.violations] == [field], values


async def test_bad_texts_are_refused_by_name(tokenizer_file: str) -> None:
    async with deployment(tokenizer_file) as running:
        for field, values in [
            ("text", dict(text="")),
            ("text", dict(text="   ")),  # has no tokens
            ("stop[1]", dict(text="w1", stop=["a", ""])),
            ("stop[0]", dict(text="w1", stop=["a" * 257])),
            ("stop", dict(text="w1", stop=["a"] * 17)),
        ]:
            error = await refusal(running, generate_request(**values))
            assert isinstance(error, InvalidArgument), (values, error)
            assert [name for name, _ in error.violations] == [field], values


async def test_every_problem_of_a_request_is_named_at_once() -> None:
    async with deployment() as running:
        error = await refusal(running, generate_request(n=0, top_p=7, grammar="x", verification=9, logprobs=2))
        assert isinstance(error, InvalidArgument)
        assert {name for name, _ in error.violations} == {"n", "top_p", "grammar", "verification", "logprobs"}


@pytest.mark.parametrize("inside", [False, True])
async def test_an_unknown_field_is_refused_by_its_number(inside: bool) -> None:
    unknown = b"\xd2\x3e\x03abc"  # field 1002, length-delimited
    message = generate_request()
    if inside:
        ids = common_ids = message.token_ids.SerializeToString() + unknown
        message.ClearField("prompt")
        data = message.SerializeToString() + b"\x12" + bytes([len(common_ids)]) + ids
    else:
        data = message.SerializeToString() + unknown
    async with deployment() as running:
        error = await refusal(running, data)
        assert isinstance(error, InvalidArgument)
        assert "1002" in str(error)


async def test_bytes_that_are_no_message_are_the_callers_fault() -> None:
    async with deployment() as running:
        for data in (b"\xff\xff\xff", b"\x0a\x05ab", b"\x0a\x02\xff\xfe", bytes(range(1, 200))):
            error = await refusal(running, data)
            assert isinstance(error, InvalidArgument), (data, error)


@pytest.mark.parametrize("values", [dict(max_tokens=CONTEXT - 2), dict(max_tokens=2**32 - 1), dict(token_ids=None)])
async def test_more_than_the_context_is_out_of_range_with_the_limit(values: dict[str, Any]) -> None:
    if "token_ids" in values:
        values = dict(token_ids={"token_ids": [1] * CONTEXT}, max_tokens=None)
    async with deployment() as running:
        error = await refusal(running, generate_request(**values))
        assert isinstance(error, ContextExceeded)
        assert str(CONTEXT) in str(error)


async def test_the_last_token_of_the_context_can_be_had() -> None:
    async with deployment() as running:
        for fields in (dict(max_tokens=CONTEXT - 3), dict(), dict(verification=BLOCK)):
            [sample] = await running.client.generate(token_ids=IDS, seed=3, **fields)
            assert len(sample.token_ids) == CONTEXT - 3
        [sample] = await running.client.generate(token_ids={"token_ids": [1] * (CONTEXT - 1)})
        assert len(sample.token_ids) == 1


class HeldVerifier(LmVerifier):
    """Passes wait while the gate is closed."""

    def __init__(self, runner: TableRunner) -> None:
        super().__init__(runner)
        self.gate = threading.Event()
        self.gate.set()

    def verify(self, jobs: Any) -> Any:
        assert self.gate.wait(PATIENCE_S)
        return super().verify(jobs)


async def test_a_full_queue_is_resource_exhausted_with_a_time_to_come_back() -> None:
    verifier = HeldVerifier(runner())
    async with cluster([verifier], max_live_sequences=3, max_waiting_requests=0) as running:
        verifier.gate.clear()
        held = asyncio.create_task(running.client.generate(token_ids=IDS, n=3, max_tokens=4, seed=1))
        async with asyncio.timeout(PATIENCE_S):
            while running.orchestrator.live_sequences < 3:
                await asyncio.sleep(0.01)
        error = await refusal(running, generate_request())
        assert isinstance(error, Overloaded)
        assert error.retry_after_s > 0
        verifier.gate.set()
        assert [len(sample.token_ids) for sample in await held] == [4, 4, 4]
        assert len((await running.client.generate(token_ids=IDS, n=3, max_tokens=4))[0].token_ids) == 4


async def test_more_samples_than_are_ever_served_at_a_time_are_refused() -> None:
    async with cluster([LmVerifier(runner())], max_live_sequences=3) as running:
        assert isinstance(await refusal(running, generate_request(n=4)), Overloaded)


async def test_the_callers_deadline_ends_the_request_and_frees_everything() -> None:
    verifier, drafter = HeldVerifier(runner()), LanguageModelDrafter(runner(blend=(2, 0.3)))
    async with cluster([verifier], [drafter]) as running:
        verifier.gate.clear()
        error = await refusal(running, generate_request(n=4), timeout_s=0.2)
        assert isinstance(error, DeadlineExceeded)
        async with asyncio.timeout(PATIENCE_S):
            while running.orchestrator.live_sequences:
                await asyncio.sleep(0.01)
        verifier.gate.set()
        await running.settled(PATIENCE_S)
        assert len((await running.client.generate(token_ids=IDS, max_tokens=4))[0].token_ids) == 4


async def test_the_servers_own_deadline_ends_the_request_and_frees_everything() -> None:
    verifier, drafter = HeldVerifier(runner()), LanguageModelDrafter(runner(blend=(2, 0.3)))
    async with cluster([verifier], [drafter], request_timeout_s=0.2) as running:
        verifier.gate.clear()
        error = await refusal(running, generate_request(n=4))
        assert isinstance(error, DeadlineExceeded)
        assert running.orchestrator.live_sequences == 0
        verifier.gate.set()
        await running.settled(PATIENCE_S)


async def test_without_a_target_a_request_is_unavailable_and_says_what_is_wrong() -> None:
    async with cluster([LmVerifier(runner())], target_wait_s=0.1) as running:
        await running.targets[0].stop()
        error = await refusal(running, generate_request())
        assert isinstance(error, NoReplica | ReplicaLost)
        assert f"127.0.0.1:{running.targets[0].port}" in str(error)


async def test_a_draining_orchestrator_refuses_what_is_new_and_ends_what_runs() -> None:
    verifier = HeldVerifier(runner())
    async with cluster([verifier]) as running:
        verifier.gate.clear()
        held = asyncio.create_task(running.client.generate(token_ids=IDS, max_tokens=20, seed=1))
        async with asyncio.timeout(PATIENCE_S):
            while not running.orchestrator.live_sequences:
                await asyncio.sleep(0.01)
        stopping = asyncio.create_task(running.orchestrator.stop(PATIENCE_S))
        await asyncio.sleep(0)
        assert isinstance(await refusal(running, generate_request()), ReplicaLost)
        verifier.gate.set()
        assert len((await held)[0].token_ids) == 20
        await stopping


@pytest.mark.parametrize("other", [dict(vocab_size=9), dict(name="x")])
async def test_a_draft_with_another_vocabulary_is_refused_and_the_target_serves_alone(other: dict[str, Any]) -> None:
    stranger = runner(**other)
    if "name" in other:
        stranger.info = dataclasses.replace(stranger.info, tokenizer_fingerprint="f" * 64)
    async with cluster([LmVerifier(runner())]) as alone:
        [expected] = await alone.client.generate(token_ids=IDS, max_tokens=20, seed=1)
    async with (
        target(LmVerifier(runner())) as targets,
        draft(LanguageModelDrafter(stranger)) as service,
        orchestrator([targets.server.port], [service.server.port]) as (_, client),
    ):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                info = await client.server_info()
                replica = next(replica for replica in info.replicas if replica.role == "draft")
                if "has the vocabulary" in replica.problem:
                    break
                await asyncio.sleep(0.02)
        assert not replica.ready
        assert not info.HasField("draft")
        theirs = (str(stranger.info.vocab_size), "8") if "name" not in other else ("f" * 12, "without a name")
        assert all(word in replica.problem for word in theirs), replica.problem
        [sample] = await client.generate(token_ids=IDS, max_tokens=20, seed=1)
        assert sample.token_ids == expected.token_ids
        assert sample.finish.speculation.num_drafts == 0
        assert (await service.load()).live_sequences == 0


# --- the model services: INVALID_ARGUMENT ---

DRAFTED = [([1, 2], [1.0, 0.5]), ([2], [1.0])]  # distributions of the chain 1, 2

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

BAD_TREES: list[tuple[str, int, common_pb2.TokenTree]] = [
    ("tree", COUPLED, tree([1, 2], [-1])),
    ("tree", COUPLED, tree([], [-1])),
    ("tree", COUPLED, tree([1, 2], [-1, 1])),
    ("tree", COUPLED, tree([1, 2], [0, -1])),
    ("tree", COUPLED, tree([1, 2], [-1, -2])),
    ("tree", COUPLED, tree([1, 2, 3], [-1, 2, 0])),
    ("tree", COUPLED, tree([1, 1], [-1, -1])),
    ("tree", COUPLED, tree([1, 2, 2], [-1, 0, 0])),
    ("tree", COUPLED, tree([1, 8])),
    ("tree", COUPLED, tree([2**32 - 1])),
    ("tree.draft_probs", COUPLED, tree([1, 2], probs=DRAFTED)),
    ("tree.draft_probs", TOKEN, tree([1, 2], [-1, -1], DRAFTED)),
    ("tree", TOKEN, tree([1, 2], probs=DRAFTED[:1])),
    ("tree", TOKEN, tree([1], probs=DRAFTED)),
    ("tree", TOKEN, tree([], probs=DRAFTED)),
    ("tree", BLOCK, tree([1, 2], [-1, -1])),
    *(
        ("tree.draft_probs[0]", BLOCK, tree([1], probs=[distribution]))
        for distribution in [
            ([1, 2], [NAN, 1.0]),
            ([1, 2], [1.0, NAN]),
            ([1, 2], [INF, 1.0]),
            ([1, 2], [1.0, -0.5]),
            ([1, 2], [0.0, 1.0]),  # the drafted token has no weight
            ([2, 3], [1.0, 0.5]),  # nor is it there at all
            ([1, 1], [1.0, 0.5]),
            ([1, 2], [0.5, 0.25]),
            ([1, 2], [2.0, 1.0]),
            ([1, 2], [0.3, 1.0]),  # no fp16 number
            ([1, 2], [1.0]),
            ([1], []),
            ([], [1.0]),
            ([1, 8], [1.0, 0.5]),
            ([1, 2**32 - 1], [1.0, 0.5]),
        ]
    ),
]


async def test_a_malformed_open_is_refused_by_field_and_disturbs_nobody() -> None:
    async with target(LmVerifier(runner())) as targets, draft(LanguageModelDrafter(runner())) as drafts:
        stream, other = targets.stream(), drafts.stream()
        await stream.send(opens=[target_open(1)])
        await stream.answer(1)
        for sequence, (field, bad) in enumerate(BAD_SPECS, 2):
            await stream.send(opens=[target_open(sequence, spec=bad)])
            await other.send(opens=[draft_open(sequence, spec=bad)])
            for each in (stream, other):
                await assert_violation(each, sequence, field)
        await stream.send(opens=[target_open(90, method=TOKEN, return_predictions=True)])
        await assert_violation(stream, 90, "return_predictions")
        await stream.send(opens=[target_open(91, stop_token_ids=[8])])
        await assert_violation(stream, 91, "stop_token_ids")
        await stream.send(rounds=[round_(1, 1, 4)])
        assert (await stream.answer(1)).round == 1
        await drafts.nothing_left(open_streams=1)


async def test_a_malformed_tree_is_refused_by_field_and_disturbs_nobody() -> None:
    async with target(LmVerifier(runner())) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1)])
        await stream.answer(1)
        for sequence, (field, method, bad) in enumerate(BAD_TREES, 2):
            await stream.send(opens=[target_open(sequence, method=method)])
            await stream.answer(sequence)
            await stream.send(rounds=[round_(sequence, 1, 4, bad)])
            await assert_violation(stream, sequence, field)
        await stream.send(rounds=[round_(1, 1, 4, tree([1, 2, 3, 4], [-1, 0, -1, 2]))])
        assert (await stream.answer(1)).round == 1
        await stream.send(closes=[1])
        await service.nothing_left(open_streams=1)


async def test_good_trees_are_taken() -> None:
    """The boundary from the other side."""
    good = [
        (COUPLED, tree([1, 2, 1, 1], [-1, -1, 0, 1])),
        (TOKEN, tree([1, 2], probs=DRAFTED)),
        (BLOCK, tree([1, 2], probs=[([1, 7], [2.0**-24, 1.0]), ([], [])])),
        (BLOCK, tree([1, 2], [-1, 0])),
        (TOKEN, tree([7])),
    ]
    async with target(LmVerifier(runner())) as service:
        stream = service.stream()
        for sequence, (method, tree_) in enumerate(good):
            await stream.send(opens=[target_open(sequence, method=method)])
            await stream.answer(sequence)
            await stream.send(rounds=[round_(sequence, 1, 4, tree_)])
            verdict = await stream.answer(sequence)
            assert not isinstance(verdict, SpecdecError), (tree_, verdict)


async def test_a_malformed_advance_is_refused_by_field_and_disturbs_nobody() -> None:
    bad: list[tuple[str, dict[str, Any]]] = [
        ("token_ids", dict(base=4, token_ids=[8])),
        ("in_flight", dict(base=3, in_flight=tree([1, 1], [-1, -1]))),
        ("in_flight", dict(base=3, in_flight=tree([9]))),
        ("budget.max_ahead", dict(base=3, max_ahead=1)),
    ]
    async with draft(LanguageModelDrafter(runner())) as service:
        stream = service.stream()
        await stream.send(opens=[draft_open(1)])
        await stream.answer(1)
        for sequence, (field, fields) in enumerate(bad, 2):
            await stream.send(opens=[draft_open(sequence)])
            await stream.answer(sequence)
            await stream.send(advances=[advance(sequence, 1, **fields)])
            await assert_violation(stream, sequence, field)
        for sequence, method in ((20, TOKEN), (21, BLOCK)):
            await stream.send(opens=[draft_open(sequence, 3, method=method)])
            await assert_violation(stream, sequence, "budget.max_nodes")
        await stream.send(opens=[draft_open(22, 3, max_ahead=1)])
        await assert_violation(stream, 22, "budget.max_ahead")
        await stream.send(advances=[advance(1, 1, 4, [5], max_nodes=3)])
        assert len((await stream.answer(1)).tree.token_ids) == 3
        await stream.send(closes=[1])
        await service.nothing_left(open_streams=1)


async def assert_violation(stream: Raw, sequence: int, field: str) -> None:
    error = await stream.error(sequence)
    assert isinstance(error, InvalidArgument), (sequence, error)
    assert [name for name, _ in error.violations] == [field], error


async def test_a_sequence_number_is_used_once_in_a_stream() -> None:
    async with target(LmVerifier(runner())) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(5), target_open(7)])
        await asyncio.gather(stream.answer(5), stream.answer(7))
        await stream.send(closes=[5])
        for number in (5, 6):
            await stream.send(opens=[target_open(number)])
            await assert_violation(stream, number, "sequence")
        await stream.send(rounds=[round_(7, 1, 4)])
        assert (await stream.answer(7)).round == 1
        other = service.stream()  # another stream has numbers of its own
        await other.send(opens=[target_open(5)])
        assert (await other.answer(5)).base == 3


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


# --- the model services: FAILED_PRECONDITION, OUT_OF_RANGE, RESOURCE_EXHAUSTED ---


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


async def test_more_than_the_targets_context_is_out_of_range_with_the_limit() -> None:
    async with target(LmVerifier(runner(context_length=16))) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, token_ids=[1] * 16), target_open(2, token_ids=[1] * 15)])
        error = await stream.error(1)
        assert isinstance(error, ContextExceeded)
        assert "16" in str(error)
        assert (await stream.answer(2)).base == 15
        await stream.send(opens=[target_open(3, token_ids=[1] * 12)])
        await stream.answer(3)
        await stream.send(rounds=[round_(3, 1, 13, tree([1, 2, 3]))])
        assert (await stream.answer(3)).base == 13  # positions 13, 14, 15
        await stream.send(opens=[target_open(4, token_ids=[1] * 12)])
        await stream.answer(4)
        await stream.send(rounds=[round_(4, 1, 13, tree([1, 2, 3, 4]))])
        assert isinstance(await stream.error(4), ContextExceeded)


async def test_a_sequence_that_finds_no_kv_slots_is_refused_and_its_neighbours_stay() -> None:
    verifier = LmVerifier(runner(num_slots=200, context_length=512))
    async with target(verifier) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, token_ids=[1] * 20)])
        await stream.answer(1)
        # Opens leave room for what is there to grow.
        await stream.send(opens=[target_open(2, token_ids=[1] * 120)])
        error = await stream.error(2)
        assert isinstance(error, Overloaded)
        assert error.retry_after_s > 0
        await stream.send(opens=[target_open(3, token_ids=[2] * 10)])
        await stream.answer(3)
        # No room is left for the tree of the older one: the younger is preempted, its caller replays it.
        await stream.send(rounds=[round_(1, 1, 21, tree([n % 6 for n in range(170)]))])
        assert isinstance(await stream.error(3), Preempted)
        assert (await stream.answer(1)).round == 1
        # A sequence that could never fit is not asked to come back.
        await stream.send(opens=[target_open(4, token_ids=[1] * 200)])
        assert isinstance(await stream.error(4), ContextExceeded)
        await stream.send(closes=[1])
        await service.nothing_left(open_streams=1)


async def test_a_draft_without_kv_slots_refuses_the_sequence_and_its_neighbours_stay() -> None:
    async with draft(LanguageModelDrafter(runner(num_slots=20))) as service:
        stream = service.stream()
        await stream.send(opens=[draft_open(1, 2, token_ids=[1] * 10)])
        await stream.answer(1)
        await stream.send(opens=[draft_open(2, 2, token_ids=[1] * 12)])
        error = await stream.error(2)
        assert isinstance(error, Overloaded)
        assert error.retry_after_s > 0
        await stream.send(advances=[advance(1, 1, 11, [3])])
        assert len((await stream.answer(1)).tree.token_ids) == 2
        await stream.send(closes=[1])
        await service.nothing_left(open_streams=1)


async def test_a_request_for_which_the_pool_is_full_just_now_waits_and_is_served() -> None:
    verifier = LmVerifier(runner(num_slots=40))
    async with cluster([verifier]) as running:
        async with asyncio.timeout(PATIENCE_S):
            both = await asyncio.gather(
                *(running.client.generate(token_ids=IDS, max_tokens=30, seed=seed) for seed in (1, 2))
            )
        assert [len(samples[0].token_ids) for samples in both] == [30, 30]
        await running.settled(PATIENCE_S)


# --- the model services: ABORTED, naming what was expected ---


async def test_a_round_out_of_step_is_aborted_naming_what_was_expected() -> None:
    verifier = HeldVerifier(runner())
    async with target(verifier) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(100)])
        await stream.answer(100)
        cases = [
            (round_(1, 2, 4), "round 1"),  # from the future
            (round_(1, 0, 4), "round 1"),  # the open's own number
            (round_(1, 2**32 - 1, 4), "round 1"),
            (round_(1, 1, 5), "base 4"),
            (round_(1, 1, 2**32 - 1), "base 4"),
            (round_(1, 1, 2), "base 4"),  # inside the prompt
            (round_(1, 1, 0), "base 4"),
        ]
        for sequence, (wrong, expected) in enumerate(cases, 101):
            await stream.send(opens=[target_open(sequence)])
            await stream.answer(sequence)
            wrong.sequence = sequence
            await stream.send(rounds=[wrong])
            await assert_out_of_step(stream, sequence, expected)
        # A duplicate, while the first is unanswered and after it.
        await stream.send(opens=[target_open(200), target_open(201)])
        await asyncio.gather(stream.answer(200), stream.answer(201))
        await stream.send(rounds=[round_(200, 1, 4), round_(200, 1, 4), round_(201, 1, 4)])
        await assert_out_of_step(stream, 200, "round 1")
        assert (await stream.answer(201)).round == 1
        await stream.send(rounds=[round_(201, 1, 4)])
        await assert_out_of_step(stream, 201, "round 2")
        # The open's own verdict is an answer to wait for.
        await stream.send(opens=[target_open(202)], rounds=[round_(202, 1, 4)])
        await assert_out_of_step(stream, 202, "round 0")
        await assert_never_opened(stream, rounds=[round_(300, 1, 4)])
        await stream.send(rounds=[round_(100, 1, 4)])
        assert (await stream.answer(100)).round == 1
        await stream.send(closes=[100])
        await service.nothing_left(open_streams=1)


async def test_an_advance_out_of_step_is_aborted_naming_what_was_expected() -> None:
    async with draft(LanguageModelDrafter(runner())) as service:
        stream = service.stream()
        await stream.send(opens=[draft_open(100)])
        await stream.answer(100)
        cases = [
            (advance(1, 2, 3), "advance 1"),
            (advance(1, 0, 3), "advance 1"),
            (advance(1, 1, 4), "base 3"),
            (advance(1, 1, 3, [1]), "base 4"),
            (advance(1, 1, 2**32 - 1, [1, 2]), "base 5"),
        ]
        for sequence, (wrong, expected) in enumerate(cases, 101):
            await stream.send(opens=[draft_open(sequence)])
            await stream.answer(sequence)
            wrong.sequence = sequence
            await stream.send(advances=[wrong])
            await assert_out_of_step(stream, sequence, expected)
        await stream.send(opens=[draft_open(200)])
        await stream.answer(200)
        await stream.send(advances=[advance(200, 1, 4, [1]), advance(200, 1, 4, [1])])
        await assert_out_of_step(stream, 200, "advance 2")
        await assert_never_opened(stream, advances=[advance(300, 1, 3)])
        await stream.send(advances=[advance(100, 1, 4, [1])])
        assert (await stream.answer(100)).advance == 1
        await stream.send(closes=[100])
        await service.nothing_left(open_streams=1)


async def assert_out_of_step(stream: Raw, sequence: int, expected: str) -> None:
    error = await stream.error(sequence)
    assert isinstance(error, OutOfStep), error
    assert re.search(rf"\b{expected}\b", str(error)), error


async def assert_never_opened(stream: Raw, **frame: Any) -> None:
    await stream.send(**frame)
    error = await stream.error(300)
    assert isinstance(error, OutOfStep)
    assert "never opened" in str(error)


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


# --- whatever comes ---

NUMBERS = [0, 1, 2, 3, 4, 5, 7, 8, 63, 64, 2**31, 2**32 - 1]
REALS = [0.0, 1.0, 0.5, -1.0, NAN, INF, -INF, 1e-300, 1e300, 2.0, 0.9]
FEW = {"sequence": 12, "closes": 12, "n": 4, "num_draft_tokens": 8, "stop": 3}


def scribble(random_: random.Random, message: Message, depth: int = 0) -> Message:
    """Fills fields by chance, mostly with what nearly makes sense."""
    for field in message.DESCRIPTOR.fields:
        if random_.random() < (0.5 if depth else 0.25):
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            if random_.random() < 0.05 and field.name == "logit_bias":
                message.logit_bias[random_.choice(NUMBERS)] = 1.0  # type: ignore[attr-defined]
        elif field.message_type is not None:
            if field.is_repeated:
                for _ in range(random_.randrange(4)):
                    scribble(random_, getattr(message, field.name).add(), depth + 1)
            elif field.name != "chat" or random_.random() < 0.05:
                scribble(random_, getattr(message, field.name), depth + 1)
                getattr(message, field.name).SetInParent()
        elif field.is_repeated:
            getattr(message, field.name).extend(_value(random_, field) for _ in range(random_.randrange(5)))
        elif field.name not in UNSUPPORTED or random_.random() < 0.03:
            setattr(message, field.name, _value(random_, field))
    return message


UNSUPPORTED = {
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "logprobs",
    "grammar",
    "model_digest",
}


def _value(random_: random.Random, field: FieldDescriptor) -> Any:
    if field.name in FEW and random_.random() < 0.95:
        return "ab"[: random_.randrange(3)] if field.name == "stop" else random_.randrange(FEW[field.name])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        value = random_.choice(REALS if random_.random() < 0.2 else [1.0, 0.5])
        return value if abs(value) < 1e38 or not math.isfinite(value) else 2.0
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return random_.choice(["", "w1 w2", "\x00", "é" * 40])
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return random_.random() < 0.2
    if field.cpp_type == FieldDescriptor.CPPTYPE_ENUM:
        return random_.choice([0, 1, 1, 2, 3, 77])
    if field.cpp_type == FieldDescriptor.CPPTYPE_INT32:
        return random_.choice([-1, -1, 0, 1, 2, -2, 2**31 - 1, -(2**31)])
    return random_.choice(NUMBERS if random_.random() < 0.15 else NUMBERS[1:7])


@pytest.mark.parametrize("seed", range(3))
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
                        setattr(message, "round" if is_target else "advance", 1)
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


async def test_no_request_breaks_the_orchestrator(tokenizer_file: str) -> None:
    random_ = random.Random(7)
    served, refused = 0, set()  # a part of them is right, for a part the context is too short
    async with deployment(tokenizer_file) as running:
        stub = generation_pb2_grpc.GenerationServiceStub(running.client._channels[0])

        async def one(message: generation_pb2.GenerateRequest) -> None:
            nonlocal served
            call = stub.Generate(message, timeout=PATIENCE_S)
            try:
                async for _ in call:
                    pass
                served += 1
            except grpc.aio.AioRpcError as error:
                refused.add(error.code())
            finally:
                call.cancel()

        for _ in range(15):
            await asyncio.gather(
                *(one(scribble(random_, generation_pb2.GenerateRequest())) for _ in range(20))  # type: ignore[arg-type]
            )
        assert served > 20, "the requests are not all nonsense"
        assert grpc.StatusCode.INVALID_ARGUMENT in refused
        assert refused <= {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE}


async def test_a_traceparent_of_nonsense_is_no_reason_to_refuse() -> None:
    async with target(LmVerifier(runner())) as service:
        stream = service.stream()
        for sequence, traceparent in enumerate(["x", "00-0-0-0", "\x00", "00-" + "f" * 32 + "-" + "0" * 16 + "-01"]):
            await stream.send(opens=[target_open(sequence, traceparent=traceparent)])
            assert (await stream.answer(sequence)).base == 3


async def test_extremes_that_are_allowed_are_served() -> None:
    extremes: Sequence[dict[str, Any]] = [
        dict(seed=2**64 - 1),
        dict(seed=0, temperature=100.0),
        dict(temperature=0.001, top_k=2**32 - 1),
        dict(top_k=1, top_p=1e-300, min_p=1.0),
        dict(top_p=5e-324),
        dict(num_draft_tokens=64),
        dict(n=64, max_tokens=2),
        dict(temperature=0.0, verification=TOKEN),
        dict(temperature=0.001, verification=BLOCK),
        dict(temperature=100.0, verification=TOKEN, top_k=2),
    ]
    async with deployment() as running:
        for extreme in extremes:
            fields = {"max_tokens": 12, **extreme}
            samples = await running.client.generate(PATIENCE_S, token_ids=IDS, **fields)
            assert all(len(sample.token_ids) == fields["max_tokens"] for sample in samples), extreme


def test_the_weights_of_the_bad_trees_are_what_they_say() -> None:
    assert struct.unpack("e", struct.pack("e", 0.3))[0] != struct.unpack("f", struct.pack("f", 0.3))[0]
    assert struct.unpack("e", struct.pack("e", 2.0**-24))[0] == 2.0**-24


def test_the_messages_fuzzed_are_those_of_the_contract() -> None:
    for message in (target_pb2.VerifyRequest(), draft_pb2.DraftRequest(), generation_pb2.GenerateRequest()):
        assert scribble(random.Random(1), message).ByteSize() > 0
