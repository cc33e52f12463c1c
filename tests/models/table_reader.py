"""What a table makes of a text, and a client that compares every token that it reads with that."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any

from specdec.client import Sample
from specdec.core.errors import NoReplica, ReplicaLost, SpecdecError
from specdec.core.noise import derive_seed
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.v1 import generation_pb2
from testing.table_model import Table

TABLE = Table(vocab_size=40, acceptance=0.7, context_length=4096)


def continuation(table: Table, spec: SequenceSpec, ids: Sequence[int], count: int) -> list[int]:
    """The next ``count`` tokens of the target after ``ids``."""
    text = list(ids)
    for _ in range(count):
        text.append(table.next_token(spec, text, len(text)))
    return text[len(ids) :]


class Reader:
    """A client's request: reads while its gate is open. ``direct`` reads the servicer itself, so that nothing but
    the orchestrator's own buffer lies between them."""

    def __init__(self, world: Any, fields: dict[str, Any], responses: AsyncGenerator[Any, None], direct: bool) -> None:
        self.fields, self.direct, self._world = fields, direct, world
        self.samples = [Sample() for _ in range(fields["n"])]
        self.error: SpecdecError | None = None
        self.cancelled = False
        self.gate = asyncio.Event()
        self.gate.set()
        self.crashes, self.moves = -world.num_crashes(begun=True), -world.num_moves
        self.task = asyncio.create_task(self._read(responses))

    async def _read(self, responses: AsyncGenerator[Any, None]) -> None:
        try:
            async with aclosing(responses):
                async for response in responses:
                    if response.HasField("chunk"):
                        self.samples[response.chunk.index].add(response.chunk)  # raises where positions do not join
                        self._world.num_chunks += 1
                    await self.gate.wait()
        except SpecdecError as error:
            self.error = error
        self.crashes += self._world.num_crashes()
        self.moves += self._world.num_moves

    async def cancel(self) -> None:
        self.cancelled = self.cancelled or not self.task.done()
        self.task.cancel()
        with suppress(asyncio.CancelledError):
            await self.task

    def check(self) -> None:
        for index, sample in enumerate(self.samples):
            ids, reason = oracle(self.fields, index)
            if self.cancelled or self.error:
                assert sample.token_ids == ids[: len(sample.token_ids)]
            else:
                assert sample.token_ids == ids
                count = len(ids) + (reason == generation_pb2.FINISH_REASON_STOP)  # with the token that ended it
                assert (sample.finish.reason, sample.finish.usage.completion_tokens) == (reason, count)
        if isinstance(self.error, NoReplica):
            assert self.crashes >= 2, f"given up after {self.crashes} crashes: {self.error}"
        elif isinstance(self.error, ReplicaLost):
            assert self.moves >= 2, f"given up after {self.moves} lost orchestrators: {self.error}"
        else:
            assert self.error is None, self.error


def oracle(fields: dict[str, Any], index: int) -> tuple[list[int], int]:
    """What this sample must be, from the table alone: ids and finish reason."""
    prompt = fields["token_ids"]["token_ids"]
    sampling = SamplingParams(fields.get("temperature", 1.0))
    spec = SequenceSpec(tuple(prompt), len(prompt), sampling, derive_seed(fields["seed"], index))
    text = continuation(TABLE, spec, prompt, fields["max_tokens"])
    for place, token in enumerate(text):
        if token in fields.get("stop_token_ids", ()):
            return text[:place], generation_pb2.FINISH_REASON_STOP
    return text, generation_pb2.FINISH_REASON_LENGTH


class Wire:
    """In place of a gRPC context: no deadline, and a write returns when it is read."""

    def __init__(self) -> None:
        self.written: asyncio.Queue[Any] = asyncio.Queue(1)

    def time_remaining(self) -> None: ...

    async def send_initial_metadata(self, metadata: Any) -> None: ...

    async def write(self, response: Any) -> None:
        await self.written.put(response)
        await self.written.join()


async def directly(servicer: Any, request: generation_pb2.GenerateRequest) -> AsyncGenerator[Any, None]:
    """The responses, from the servicer itself: nothing but the orchestrator's own buffer is between."""
    wire = Wire()
    call = asyncio.create_task(servicer.Generate(request, wire))
    reading: asyncio.Task[Any] | None = None
    try:
        while True:
            reading = asyncio.create_task(wire.written.get())
            await asyncio.wait({call, reading}, return_when=asyncio.FIRST_COMPLETED)
            if not reading.done():
                await call
                return
            yield reading.result()
            wire.written.task_done()
    finally:
        for task in (call, reading):
            if task is not None:
                task.cancel()
                with suppress(asyncio.CancelledError, SpecdecError):
                    await task
