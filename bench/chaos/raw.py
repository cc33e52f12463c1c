"""A raw stream to a model service that can send any frame, as an untrusted peer could. Knows frames and answers by
sequence; does not know which are right.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc

from specdec.core.errors import SpecdecError, from_status
from specdec.transport import rpc
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc

_ANSWER_TIMEOUT_S = 10.0


class RawStream:
    """``answer(sequence)`` is the next Verdict, Growth or SpecdecError of a sequence. Raises TimeoutError."""

    def __init__(self, call: Any, request: Any) -> None:
        self._call = call
        self._request = request
        self._inboxes: dict[int, asyncio.Queue[Any]] = defaultdict(asyncio.Queue)
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for response in self._call:
                for entry in getattr(response, "verdicts", ()) or getattr(response, "growths", ()):
                    self._inboxes[entry.sequence].put_nowait(entry)
                for error in response.errors:
                    self._inboxes[error.sequence].put_nowait(from_status(error.status))

    async def send(self, **frame: Any) -> None:
        await self._call.write(self._request(**frame))

    async def answer(self, sequence: int) -> Any:
        async with asyncio.timeout(_ANSWER_TIMEOUT_S):
            return await self._inboxes[sequence].get()

    async def error(self, sequence: int) -> SpecdecError:
        """The next error of the sequence; answers before it are skipped."""
        while not isinstance(answer := await self.answer(sequence), SpecdecError):
            pass
        return answer

    async def close(self) -> None:
        self._call.cancel()
        self._reader.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)


@asynccontextmanager
async def target_stream(address: str) -> AsyncIterator[RawStream]:
    async with rpc.channel(address) as channel:
        stream = RawStream(target_pb2_grpc.TargetServiceStub(channel).Verify(), target_pb2.VerifyRequest)
        try:
            yield stream
        finally:
            await stream.close()


@asynccontextmanager
async def draft_stream(address: str) -> AsyncIterator[RawStream]:
    async with rpc.channel(address) as channel:
        stream = RawStream(draft_pb2_grpc.DraftServiceStub(channel).Draft(), draft_pb2.DraftRequest)
        try:
            yield stream
        finally:
            await stream.close()


def spec(token_ids: Any = (1, 2, 3), temperature: float = 0.8, seed: int = 5) -> common_pb2.SequenceSpec:
    return common_pb2.SequenceSpec(
        token_ids=token_ids,
        num_prompt_tokens=len(token_ids),
        sampling=common_pb2.SamplingParams(temperature=temperature, top_p=1.0),
        seed=seed,
        method=common_pb2.VERIFICATION_METHOD_COUPLED,
    )
