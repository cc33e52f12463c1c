"""A small asynchronous client of GenerationService. Errors are those of specdec.errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

import grpc

from specdec import rpc
from specdec.v1 import generation_pb2, generation_pb2_grpc


@dataclass(slots=True)
class Sample:
    """One finished sample."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)  # generation_pb2.TokenOrigin, one per id
    text_ends: list[int] = field(default_factory=list)  # per id: where its text ends
    finish: generation_pb2.Finish = field(default_factory=generation_pb2.Finish)

    def add(self, chunk: generation_pb2.Chunk) -> None:
        assert chunk.first_position == len(self.token_ids), "chunks of a sample come in order and without gaps"
        self.text += chunk.text
        self.token_ids.extend(chunk.token_ids)
        self.origins.extend(chunk.origins)
        self.text_ends.extend(chunk.text_ends)
        if chunk.HasField("finish"):
            self.finish.CopyFrom(chunk.finish)


class Client:
    """``async with Client("host:port") as client``."""

    def __init__(self, address: str, credentials: grpc.ChannelCredentials | None = None) -> None:
        self._channel = rpc.channel(address, credentials)
        self._stub = generation_pb2_grpc.GenerationServiceStub(self._channel)

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def stream(
        self, timeout_s: float | None = None, **fields: Any
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The responses to a GenerateRequest with these fields. Raises SpecdecError."""
        call = self._stub.Generate(generation_pb2.GenerateRequest(**fields), timeout=timeout_s)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise rpc.error_of(error) from error
        finally:
            # A call that is merely dropped is never collected.
            call.cancel()

    async def generate(self, timeout_s: float | None = None, **fields: Any) -> list[Sample]:
        """All samples of a request, by index. Raises SpecdecError."""
        samples = [Sample() for _ in range(fields.get("n", 1))]
        async for response in self.stream(timeout_s, **fields):
            if response.HasField("chunk"):
                samples[response.chunk.index].add(response.chunk)
        return samples

    async def server_info(self, timeout_s: float = 5.0) -> generation_pb2.GetServerInfoResponse:
        """What the orchestrator knows of its replicas. Raises SpecdecError."""
        try:
            info: generation_pb2.GetServerInfoResponse = await self._stub.GetServerInfo(
                generation_pb2.GetServerInfoRequest(), timeout=timeout_s
            )
        except grpc.aio.AioRpcError as error:
            raise rpc.error_of(error) from error
        return info
