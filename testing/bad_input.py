"""Bad frames and requests: valid messages with random fields of every type, and random bytes. Knows the messages'
descriptors; does not know which values the services accept.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import grpc
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.rpc import code_pb2, error_details_pb2, status_pb2
from grpc_status import rpc_status

from specdec.transport import rpc
from specdec.v1 import draft_pb2, generation_pb2, target_pb2
from testing.patience import PATIENCE_S
from testing.raw import BLOCK, COUPLED, TOKEN, advance, draft_open, round_, target_open, tree

_FRAMES_PER_STREAM = 25
_CONCURRENCY = 8

_METHODS: dict[str, tuple[str, Any, Any]] = {
    "target": ("/specdec.v1.TargetService/Verify", target_pb2.VerifyRequest, target_pb2.VerifyResponse),
    "draft": ("/specdec.v1.DraftService/Draft", draft_pb2.DraftRequest, draft_pb2.DraftResponse),
    "orchestrator": (
        "/specdec.v1.GenerationService/Generate",
        generation_pb2.GenerateRequest,
        generation_pb2.GenerateResponse,
    ),
}


async def attack(role: str, address: str, count: int, chance: random.Random) -> Counter[str]:
    """Send ``count`` bad messages and return how often each status came. An accepted message counts as OK."""
    path, _, response = _METHODS[role]
    statuses: Counter[str] = Counter()
    size = 1 if role == "orchestrator" else _FRAMES_PER_STREAM
    async with rpc.channel(address) as channel:
        for start in range(0, count, size * _CONCURRENCY):
            sizes = [min(size, count - begin) for begin in range(start, min(count, start + size * _CONCURRENCY), size)]
            streams = [frames(role, size, chance) for size in sizes]
            send = _ask if role == "orchestrator" else _stream
            await asyncio.gather(*(send(channel, path, response, each, statuses) for each in streams))
    return statuses


def frames(role: str, count: int, chance: random.Random) -> list[bytes]:
    """Serialised messages: mostly right ones with random fields, some without right ones or with a flipped bit, and
    random bytes. Numbers of sequences rise as they must; else nothing would ever be opened."""
    serialised = []
    for sequence in range(1, count + 1):
        kind = chance.random()
        message = _good(role, sequence, chance) if kind < 0.6 else _METHODS[role][1]()
        for _ in range(chance.choice((0, 0, 1, 2, 4))):
            disturb(message, chance)
        if role == "orchestrator":  # a request that is accepted should end soon
            message.max_tokens = min(message.max_tokens or 4, 1 << 17 if chance.random() < 0.1 else 8)
        data = bytearray(message.SerializeToString())
        if kind > 0.9 and data:
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        serialised.append(bytes(data) if kind > 0.05 else chance.randbytes(chance.randint(1, 200)))
    return serialised


def _good(role: str, sequence: int, chance: random.Random) -> Any:
    if role == "orchestrator":
        prompt = generation_pb2.TokenIds(token_ids=[1, 2, 3])
        return generation_pb2.GenerateRequest(token_ids=prompt, max_tokens=4, seed=3)
    method = chance.choice((COUPLED, COUPLED, COUPLED, TOKEN, BLOCK))
    earlier = chance.randint(max(1, sequence - 3), sequence)
    if role == "target":
        opened = target_open(sequence, method=method)
        return target_pb2.VerifyRequest(opens=[opened], rounds=[round_(earlier, 1, 4, tree([1, 2]))])
    return draft_pb2.DraftRequest(opens=[draft_open(sequence, method=method)], advances=[advance(earlier, 1, 4, [1])])


def disturb(message: Any, chance: random.Random) -> None:
    """Set, extend or clear one random field of the message."""
    field = chance.choice(message.DESCRIPTOR.fields)
    if chance.random() < 0.1:
        message.ClearField(field.name)
        return
    value = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key = _scalar(field.message_type.fields_by_name["key"], chance)
        inner = field.message_type.fields_by_name["value"]
        if inner.message_type is None:
            value[key] = _scalar(inner, chance)
        else:
            disturb(value[key], chance)
    elif field.is_repeated:
        for _ in range(chance.choice([1, 1, 2, 5, 40])):
            if field.message_type is None:
                value.append(_scalar(field, chance))
            else:
                disturb(chance.choice(value) if value and chance.random() < 0.7 else value.add(), chance)
    elif isinstance(value, Message):
        disturb(value, chance)
        value.SetInParent()
    else:
        setattr(message, field.name, _scalar(field, chance))


def _scalar(field: Any, chance: random.Random) -> Any:
    wild = chance.choice([0, 1, 2, 3, 5, 1023, 1024, 4096, 65535, 65536, 2**31 - 1])
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return (
            chance.choice([b"", b"\0\xff"])
            if field.type == FieldDescriptor.TYPE_BYTES
            else "\0\U0001f600" * (wild % 99)
        )
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice([0.0, 1.0, 0.5, -1.0, 1e30, 1e-30, float("nan"), float("inf"), -float("inf")])
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if field.cpp_type in (FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64):
        return chance.choice([wild, -1, -2, -(2**31)])
    if field.cpp_type == FieldDescriptor.CPPTYPE_UINT64:
        return chance.choice([wild, 2**64 - 1, chance.getrandbits(64)])
    return chance.choice([wild, 2**32 - 1]) if field.cpp_type == FieldDescriptor.CPPTYPE_UINT32 else wild


def _count(statuses: Counter[str], status: status_pb2.Status) -> None:
    name = code_pb2.Code.Name(status.code)
    statuses[name] += 1
    if name in ("UNKNOWN", "INTERNAL"):
        statuses[f"{name}: {status.message[:120]}"] += 1
    fields = any(detail.Is(error_details_pb2.BadRequest.DESCRIPTOR) for detail in status.details)
    if name == "INVALID_ARGUMENT" and not fields:
        statuses["INVALID_ARGUMENT without a field"] += 1


def _count_failed(statuses: Counter[str], error: grpc.aio.AioRpcError) -> None:
    if error.code() is grpc.StatusCode.INTERNAL and error.details() == "Internal error from Core":
        # grpcio's client invents this status when it writes to a stream that the server is just ending.
        statuses["status lost in grpcio's client"] += 1
        return
    status = rpc_status.from_call(error)
    _count(statuses, status or status_pb2.Status(code=error.code().value[0], message=error.details() or ""))


async def _ask(
    channel: grpc.aio.Channel, path: str, response: Any, frames: list[bytes], statuses: Counter[str]
) -> None:
    method: Any = channel.unary_stream(path, None, response.FromString)
    call = method(frames[0], timeout=3)
    try:
        async for _ in call:
            pass
        statuses["OK"] += 1
    except grpc.aio.AioRpcError as error:
        _count_failed(statuses, error)
    finally:
        call.cancel()


async def _stream(
    channel: grpc.aio.Channel, path: str, response: Any, frames: list[bytes], statuses: Counter[str]
) -> None:
    """Send the frames in one stream; open a new one for the rest after a bad frame has ended it."""
    queue = list(frames)
    while queue:
        call: Any = channel.stream_stream(path, None, response.FromString)(timeout=PATIENCE_S)

        async def write(call: Any = call) -> None:
            while queue:
                await call.write(queue[0])
                queue.pop(0)
                await asyncio.sleep(0)
            await asyncio.sleep(0.05)  # for the verdicts on the accepted rounds
            call.cancel()

        writer = asyncio.create_task(write())
        try:
            async for frame in call:
                for error in frame.errors:
                    _count(statuses, error.status)
                statuses["OK"] += len(getattr(frame, "verdicts", ()) or getattr(frame, "growths", ()))
        except grpc.aio.AioRpcError as error:
            _count_failed(statuses, error)
            queue[:1] = []  # the frame that caused it, or its neighbour
        except asyncio.CancelledError:
            pass  # caused by our own writer
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
            call.cancel()
