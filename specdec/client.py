"""A small asynchronous client of GenerationService. Errors are those of specdec.errors.

It survives the loss of an orchestrator: a request goes on at the next address with the ids received so far, and no
token is lost or repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import grpc

from specdec import rpc
from specdec.errors import ReplicaLost
from specdec.tls import Tls
from specdec.v1 import generation_pb2, generation_pb2_grpc

_ROUNDS, _PAUSE_S = 3, 0.5
"""How often all addresses are tried before a request is given up, and the pause between."""


@dataclass(slots=True)
class Sample:
    """One sample, as far as it was received."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)  # generation_pb2.TokenOrigin, one per id
    text_ends: list[int] = field(default_factory=list)  # per id: where its text ends
    finish: generation_pb2.Finish = field(default_factory=generation_pb2.Finish)

    @property
    def finished(self) -> bool:
        return bool(self.finish.reason)

    def add(self, chunk: generation_pb2.Chunk) -> None:
        """Raises ValueError if a chunk was lost or repeated."""
        if chunk.first_position != len(self.token_ids):
            raise ValueError(f"a chunk begins at {chunk.first_position}, {len(self.token_ids)} ids were received")
        self.text += chunk.text
        self.token_ids.extend(chunk.token_ids)
        self.origins.extend(chunk.origins)
        self.text_ends.extend(chunk.text_ends)
        if chunk.HasField("finish"):
            self.finish.CopyFrom(chunk.finish)


class Client:
    """``async with Client("host:port") as client``; further addresses are for when that one is lost.

    With ``tls``, which needs only a CA here, their certificates must have the name ``tls_name``, or the host's if that
    is empty. ``api_key`` is the token of a deployment that asks for one.
    """

    def __init__(
        self, *addresses: str, tls: Tls | None = None, tls_name: str = "orchestrator", api_key: str = ""
    ) -> None:
        if not addresses:
            raise ValueError("at least one address is required")
        self._channels = [rpc.channel(address, tls, tls_name) for address in addresses]
        self._metadata = rpc.bearer(api_key)
        self._stubs = [generation_pb2_grpc.GenerationServiceStub(channel) for channel in self._channels]
        self._at = 0  # the address in use

    async def __aenter__(self) -> Client:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in self._channels:
            await channel.close()

    async def stream(
        self, timeout_s: float | None = None, **fields: Any
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        """The responses to a GenerateRequest with these fields, wherever they come from. Raises SpecdecError."""
        request = generation_pb2.GenerateRequest(**fields)
        samples = _resumed(request)
        started = time.monotonic()
        admitted = False
        lost_in_a_row = 0
        while True:
            at = self._at
            remaining_s = None if timeout_s is None else max(0.0, started + timeout_s - time.monotonic())
            try:
                async with aclosing(self._once(at, request, remaining_s)) as responses:
                    async for response in responses:
                        lost_in_a_row = 0
                        if response.HasField("chunk"):
                            sample = samples.setdefault(response.chunk.index, Sample())
                            if sample.finished:
                                continue  # a resumed request tells the end again of what had ended
                            sample.add(response.chunk)
                        elif admitted:
                            continue
                        else:
                            admitted, request.seed = True, response.admission.seed
                        yield response
                    return
            except ReplicaLost:
                lost_in_a_row += 1
                if len(self._stubs) == 1 or lost_in_a_row >= _ROUNDS * len(self._stubs):
                    raise
                if lost_in_a_row % len(self._stubs) == 0:
                    await asyncio.sleep(_PAUSE_S)  # all are gone at once: a restart, perhaps
                if self._at == at:  # many requests lose one address together, and must not go on in a circle
                    self._at = (at + 1) % len(self._stubs)
                for index, sample in samples.items():
                    request.resume[index].token_ids[:] = sample.token_ids

    async def _once(
        self, at: int, request: generation_pb2.GenerateRequest, timeout_s: float | None
    ) -> AsyncGenerator[generation_pb2.GenerateResponse, None]:
        call = self._stubs[at].Generate(request, timeout=timeout_s, metadata=self._metadata)
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as error:
            raise rpc.error_of(error) from error
        finally:
            # A call that is merely dropped is never collected.
            call.cancel()

    async def generate(self, timeout_s: float | None = None, **fields: Any) -> list[Sample]:
        """All samples of a request, by index. Raises SpecdecError.

        Of ids that it resumes with, ``token_ids`` is all that a sample has: their text and origins are not sent again.
        """
        resumed = _resumed(generation_pb2.GenerateRequest(**fields))
        samples = [resumed.get(index, Sample()) for index in range(fields.get("n") or 1)]
        async for response in self.stream(timeout_s, **fields):
            if response.HasField("chunk"):
                samples[response.chunk.index].add(response.chunk)
        return samples

    async def server_info(self, timeout_s: float = 5.0) -> generation_pb2.GetServerInfoResponse:
        """What the orchestrator knows of its replicas. Raises SpecdecError."""
        try:
            info: generation_pb2.GetServerInfoResponse = await self._stubs[self._at].GetServerInfo(
                generation_pb2.GetServerInfoRequest(), timeout=timeout_s, metadata=self._metadata
            )
        except grpc.aio.AioRpcError as error:
            raise rpc.error_of(error) from error
        return info


def _resumed(request: generation_pb2.GenerateRequest) -> dict[int, Sample]:
    """What had been received before this request, by index."""
    return {index: Sample(token_ids=list(ids.token_ids)) for index, ids in request.resume.items()}
