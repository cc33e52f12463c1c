"""A request that is to be refused, and the error it gets: never INTERNAL, whatever was in it."""

from __future__ import annotations

from typing import Any

import grpc
from google.protobuf.message import Message

from specdec.core.errors import SpecdecError
from specdec.transport import rpc
from specdec.v1 import generation_pb2
from testing.patience import PATIENCE_S
from tests.cluster import Cluster

IDS = {"token_ids": [1, 2, 3]}


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
