"""A target over TLS, and callers that show a certificate of their choice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc

from specdec.core.settings import EngineSettings
from specdec.security.tls import Tls
from specdec.server.model_server import ModelServer
from specdec.transport import rpc
from specdec.v1 import common_pb2, target_pb2, target_pb2_grpc
from target_service.language_model import LmVerifier
from target_service.server import create_server as create_target_server
from testing.certificates import files
from testing.raw import started, target_open
from tests.contract.bad import runner

REQUEST: dict[str, Any] = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 40, "seed": 1}
PATIENCE_S = 20.0


@asynccontextmanager
async def target(directory: Path | None, **settings: Any) -> AsyncIterator[ModelServer]:
    own = files(directory, "target") if directory else {}
    async with started(create_target_server(LmVerifier(runner()), EngineSettings(**own, **settings))) as server:
        yield server


async def unary(address: str, tls: Tls | None, name: str = "target") -> common_pb2.GetModelInfoResponse:
    async with rpc.channel(address, tls, name) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        try:
            answer: common_pb2.GetModelInfoResponse = await stub.GetModelInfo(
                common_pb2.GetModelInfoRequest(), timeout=PATIENCE_S
            )
        except grpc.aio.AioRpcError as error:
            raise rpc.error_of(error) from error
        return answer


async def verify(address: str, tls: Tls | None) -> int:
    """The base of the verdict on an open."""
    async with rpc.channel(address, tls, "target") as channel:
        call = target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=PATIENCE_S)
        try:
            await call.write(target_pb2.VerifyRequest(opens=[target_open(1)]))
            while not (response := await call.read()).verdicts:
                pass
            return int(response.verdicts[0].base)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, AttributeError):
            error = grpc.aio.AioRpcError(
                await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
            )
        finally:
            call.cancel()
    if error.details() == "Internal error from Core":
        return await verify(address, tls)  # a write that failed as the server had ended the stream hides why it did
    raise rpc.error_of(error)
