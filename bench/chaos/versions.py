"""Row 25: an older contract on one side. Knows which fields are newest; does not know their meaning."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.rpc import status_pb2

from bench.chaos.lab import Lab
from bench.chaos.outcome import Outcome
from bench.chaos.traffic import Traffic, check_same, several
from specdec.client import Client
from specdec.core.errors import InvalidArgument
from specdec.transport import rpc
from specdec.v1 import common_pb2, draft_pb2, generation_pb2, target_pb2

_NEWEST = {
    "ModelInfo": {"instance", "eos_token_ids", "capabilities", "max_chain", "tokens"},
    "GetModelInfoRequest": {"tokens"},
    "Load": {"open_streams", "passes"},
    "Verdict": {"predictions", "timings", "num_feature_rows", "run_on", "dropped_round", "refused"},
    "Round": {"max_nodes"},
    "VerifyResponse": {"features"},
    "TargetOpen": {"request_age_ms", "return_predictions", "num_preemptions"},
    "Chunk": {"text_ends", "origins"},
    "GenerateRequest": {"resume", "cache_salt"},
    "SequenceSpec": {"cache_salt"},
    "SamplingParams": {
        *("repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "min_tokens", "end_token_ids"),
    },
    "SpeculationStats": {"num_replays"},
    "GetServerInfoResponse": {"waiting_requests", "methods"},
}
"""Fields by message that a contract before the latest additions would lack. There is no previous contract yet."""


def _older() -> descriptor_pool.DescriptorPool:
    """The contract without the newest fields."""
    pool = descriptor_pool.DescriptorPool()
    for module in (status_pb2, common_pb2, target_pb2, draft_pb2, generation_pb2):
        _add(pool, module.DESCRIPTOR)
    return pool


def _add(pool: descriptor_pool.DescriptorPool, file: Any) -> None:
    try:
        pool.FindFileByName(file.name)
        return
    except KeyError:
        pass
    for dependency in file.dependencies:
        _add(pool, dependency)
    proto = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(proto)
    for message in proto.message_type:
        kept = [field for field in message.field if field.name not in _NEWEST.get(message.name, ())]
        # An optional field has a oneof of its own, which must not remain empty.
        used = sorted({field.oneof_index for field in kept if field.HasField("oneof_index")})
        oneofs = [message.oneof_decl[index] for index in used]
        for field in kept:
            if field.HasField("oneof_index"):
                field.oneof_index = used.index(field.oneof_index)
        del message.field[:], message.oneof_decl[:]
        message.field.extend(kept)
        message.oneof_decl.extend(oneofs)
    pool.Add(proto)


class Older:
    """Message classes of the older contract, by name."""

    def __init__(self) -> None:
        self._pool = _older()

    def __getitem__(self, name: str) -> Any:
        return message_factory.GetMessageClass(self._pool.FindMessageTypeByName(f"specdec.v1.{name}"))


class Translator:
    """A proxy that presents a model service with the older contract: it drops unknown fields in both directions."""

    def __init__(self, service: str, method: str, request: Any, response: Any, info: Any, upstream: str) -> None:
        self._paths = (f"/specdec.v1.{service}/{method}", f"/specdec.v1.{service}/GetModelInfo")
        self._request, self._response, self._info = request, response, info
        self._channel = rpc.channel(upstream)
        handlers: dict[str, Any] = {
            method: grpc.stream_stream_rpc_method_handler(self._stream),
            "GetModelInfo": grpc.unary_unary_rpc_method_handler(self._get_info),
        }
        self._server = grpc.aio.server()
        generic = grpc.method_handlers_generic_handler(f"specdec.v1.{service}", handlers)
        self._server.add_generic_rpc_handlers((generic,))
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    async def __aenter__(self) -> Translator:
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._server.stop(0)
        await self._channel.close()

    async def _get_info(self, request: bytes, context: Any) -> bytes:
        call: Any = self._channel.unary_unary(self._paths[1])
        return _through(self._info, await call(request))

    async def _stream(self, frames: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        call: Any = self._channel.stream_stream(self._paths[0])()

        async def up() -> None:
            async for frame in frames:
                await call.write(_through(self._request, frame))

        writer = asyncio.create_task(up())
        try:
            async for response in call:
                yield _through(self._response, response)
        finally:
            writer.cancel()
            call.cancel()


def _through(older: Any, data: bytes) -> bytes:
    message = older.FromString(data)
    message.DiscardUnknownFields()
    return bytes(message.SerializeToString())


async def _check_not_ignored(outcome: Outcome, client: Client) -> None:
    """Check that a request is refused if it needs a field that an older target would drop unread."""
    try:
        await client.generate(10.0, token_ids={"token_ids": [1]}, max_tokens=4, presence_penalty=0.5)
    except InvalidArgument as error:
        refused = [name for name, _ in error.violations]
    else:
        refused = []
    outcome.check(refused == ["presence_penalty"], f"a penalty that older targets do not know is refused: {refused}")


async def row_25(lab: Lab, seed: int, short: bool) -> Outcome:
    """A client speaks only an older contract; then replicas do, one of which is killed. There is no previous contract
    yet, so the older one is this one without its newest fields."""
    outcome = Outcome()
    older = Older()
    count = 4 if short else 20
    async with lab.deployment(num_targets=2) as found:
        async with rpc.channel(found.orchestrator.address) as channel:
            generate: Any = channel.unary_stream(
                "/specdec.v1.GenerationService/Generate",
                older["GenerateRequest"].SerializeToString,
                older["GenerateResponse"].FromString,
            )
            right = 0
            for asked in several(count, 60, lab.chance):
                request = older["GenerateRequest"](
                    max_tokens=asked.max_tokens, seed=asked.seed, temperature=asked.temperature
                )
                request.token_ids.token_ids.extend(asked.prompt)
                ids: list[int] = []
                async for response in generate(request):
                    ids.extend(response.chunk.token_ids)
                right += ids == asked.expected(lab.reference)
            outcome.check(right == count, f"an older client: {right} of {count} same")
        verify = (older["VerifyRequest"], older["VerifyResponse"], older["GetModelInfoResponse"])
        draft = (older["DraftRequest"], older["DraftResponse"], older["GetModelInfoResponse"])
        async with (
            Translator("TargetService", "Verify", *verify, found.targets[0].address) as first,
            Translator("TargetService", "Verify", *verify, found.targets[1].address) as second,
            Translator("DraftService", "Draft", *draft, found.drafts[0].address) as drafting,
            lab.processes() as make,
        ):
            targets = f"--target=127.0.0.1:{first.port},127.0.0.1:{second.port}"
            front = make("orchestrator", targets, f"--draft=127.0.0.1:{drafting.port}")
            await front.start()
            await front.healthy()
            async with Client(front.address) as client:
                found.client = client
                await found.ready()
                await _check_not_ignored(outcome, client)
                async with Traffic(client, several(count, 200, lab.chance)) as traffic:
                    await traffic.reached(0.3)
                    await found.targets[0].kill()
                    answers = await traffic.finished(60.0)
        check_same(outcome, answers, lab.reference, "with older replicas, one of which died")
        drafted = sum(answer.sample.finish.speculation.num_accepted_tokens for answer in answers)
        outcome.at_least("draft tokens accepted", drafted, 1)
    return outcome
