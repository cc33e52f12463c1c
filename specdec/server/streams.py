"""The server side of the model services' streams: frames in, entries to the step loop, frames out.

Knows the states of a sequence inside a stream (opened, unanswered, ended); does not know what an entry means, for which
each service has a codec.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from opentelemetry import trace

from specdec.core.errors import CALLERS_FAULTS, InvalidArgument, OutOfStep, PassFailed, SpecdecError
from specdec.core.rounds import Load
from specdec.server.chunked_opens import ChunkedOpens
from specdec.server.step_loop import Engine, Key, Results, StepLoop
from specdec.telemetry.setup import context_of

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
"""A stream with an unanswered entry sends a frame at least this often."""

_MESSAGES_PER_TURN = 256
"""Messages of a frame that are processed before other tasks run: a frame may have a million messages."""

_MAX_UNREAD = 16
"""Unread results per live sequence above which a stream is paused (backpressure)."""


class Codec(Protocol):
    """Reads and writes the frames of a service. Messages have the field ``sequence``; opens also ``spec`` and ``more``.

    The ``read_*`` methods raise SpecdecError, which ends the sequence.
    """

    def split(self, frame: Any) -> tuple[Iterable[Any], Iterable[Any], Iterable[int]]:
        """The opens, entries and closes of a request frame."""

    def read_open(self, message: Any) -> Any: ...

    def read_entry(self, message: Any) -> Any: ...

    def number(self, message: Any) -> int:
        """The number of an entry's round or advance."""

    def answers(self, result: Any) -> int | None:
        """The number of the entry for which this result is the last answer; None if more results follow."""

    def attributes(self, result: Any) -> dict[str, int]:
        """The attributes of a result in a trace."""

    def frames(self, results: Sequence[tuple[int, Any]], unanswered: Iterable[int], load: Load) -> Iterable[Any]:
        """Response frames: one, unless it would be too long. ``unanswered``: sequences with a heartbeat due."""


class StreamServer:
    """All streams of one service, in front of one engine. Create it on the event loop that serves."""

    def __init__(self, engine: Engine, codec: Codec, name: str) -> None:
        self._codec = codec
        self._streams: dict[int, _Stream] = {}
        self._numbers = itertools.count()
        self._loop = StepLoop(engine, self._deliver, name)

    @property
    def step_loop(self) -> StepLoop:
        return self._loop

    @property
    def load(self) -> Load:
        return dataclasses.replace(self._loop.engine.load, open_streams=len(self._streams))

    @property
    def busy_s(self) -> float:
        """Total working time of the model thread."""
        return self._loop.busy_s

    async def serve(self, frames: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        """Yield the response frames of one stream. However the stream ends, its sequences are released at once."""
        stream = _Stream(next(self._numbers), self._loop, self._codec)
        self._streams[stream.number] = stream
        tasks = [asyncio.create_task(self._read(frames, stream)), asyncio.create_task(stream.beat())]
        try:
            while (content := await stream.content()) is not None:
                stream.writing = True
                for frame in self._codec.frames(*content, self.load):
                    yield frame
                stream.writing = False  # the generator resumes only after the frame is written
            if stream.failure is not None:
                raise stream.failure
        finally:
            for task in tasks:
                task.cancel()
            del self._streams[stream.number]
            stream.end_all()

    async def drain(self, timeout_s: float) -> None:
        """Refuse opens, end each sequence once it has no unanswered entry, and wait (at most so long) for the peers."""
        self._loop.drain()
        self._loop.post()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(stream.busy for stream in self._streams.values()):  # noqa: ASYNC110
                    await asyncio.sleep(0.02)

    async def stop(self) -> None:
        """Release all sequences and end the model's thread."""
        for stream in self._streams.values():
            stream.end_all()
        await self._loop.stop()

    async def _read(self, frames: AsyncIterator[Any], stream: _Stream) -> None:
        try:
            async for frame in frames:
                for _ in stream.take(frame):
                    await asyncio.sleep(0)
                    await stream.not_paused.wait()
                await stream.not_paused.wait()
        except SpecdecError as error:
            stream.failure = error
        except Exception:
            log.exception("a stream could not be read; its sequences are returned for replay")
            stream.failure = PassFailed("the service failed on this stream")
        finally:
            stream.half_close()

    def _deliver(self, results: Results) -> None:
        for key, result in results:
            if (stream := self._streams.get(key.stream)) is not None:
                stream.deliver(key.sequence, result)


class _Stream:
    """One open stream and its sequences. Lives on the event loop."""

    def __init__(self, number: int, loop: StepLoop, codec: Codec) -> None:
        self.number = number
        self.unanswered: dict[int, int] = {}  # sequence -> number of its unanswered entry
        self.failure: SpecdecError | None = None  # an error of the peer that ends the whole stream
        self._loop = loop
        self._codec = codec
        self._opened_up_to = -1
        self._partial = ChunkedOpens()
        self._live: dict[int, trace.Span] = {}
        self._outbox: list[tuple[int, Any]] = []
        self._wake = asyncio.Event()
        self._heartbeat_due = False
        self._half_closed = False
        self.writing = False
        self.not_paused = asyncio.Event()
        self.not_paused.set()
        self._tracer = trace.get_tracer("specdec")

    # --- from the peer ---

    def take(self, frame: Any) -> Iterator[None]:
        """Process a request frame. Yields when other tasks should run, or while the stream is paused."""
        for number, _ in enumerate(self._take_in(frame), 1):
            if number % _MESSAGES_PER_TURN == 0 or not self.not_paused.is_set():
                self._loop.post()
                yield
        self._loop.post()

    def _take_in(self, frame: Any) -> Iterator[None]:
        opens, entries, closes = self._codec.split(frame)
        for message in opens:
            self._guard(self._take_open, message)
            yield
        for message in entries:
            self._guard(self._take_entry, message)
            yield
        for sequence in closes:
            self._end(sequence)
            yield

    def half_close(self) -> None:
        self._half_closed = True
        for sequence in list(self._partial):
            self._end(sequence)
            self._send(sequence, OutOfStep("the stream was half-closed; the rest of the open was expected"))
        self._wake.set()

    def _guard(self, verb: Callable[[Any], None], message: Any) -> None:
        try:
            verb(message)
        except SpecdecError as error:
            self._end(message.sequence)
            self._send(message.sequence, error)

    def _take_open(self, message: Any) -> None:
        sequence: int = message.sequence
        if sequence not in self._partial:
            if sequence <= self._opened_up_to:
                raise InvalidArgument([("sequence", f"{sequence} is not above those opened before in this stream")])
            self._opened_up_to = sequence
            self.unanswered[sequence] = 0
        whole = self._partial.add(message)
        if whole is not None:
            open_ = self._codec.read_open(whole)
            context = context_of(whole.spec.traceparent)
            self._live[sequence] = self._tracer.start_span("sequence", context, trace.SpanKind.SERVER)
            self._loop.open(Key(self.number, sequence), open_)

    def _take_entry(self, message: Any) -> None:
        sequence: int = message.sequence
        if sequence > self._opened_up_to:
            raise OutOfStep(f"sequence {sequence} was never opened in this stream; open it first")
        if sequence in self._partial:
            raise OutOfStep(f"sequence {sequence} is still being opened; the rest of its open was expected")
        if sequence in self._live:
            entry = self._codec.read_entry(message)
            self.unanswered[sequence] = self._codec.number(message)
            self._loop.submit(Key(self.number, sequence), entry)

    def _end(self, sequence: int) -> None:
        self._partial.drop(sequence)
        self.unanswered.pop(sequence, None)
        if (span := self._live.pop(sequence, None)) is not None:
            span.end()
            self._loop.close(Key(self.number, sequence))

    def end_all(self) -> None:
        for sequence in [*self._live, *self._partial]:
            self._end(sequence)
        self._pause(False)
        self._loop.post()

    # --- to the peer ---

    def deliver(self, sequence: int, result: Any) -> None:
        if (span := self._live.get(sequence)) is None:
            return
        if span.is_recording():
            span.add_event(*self._event(result))
        if isinstance(result, SpecdecError):
            del self._live[sequence]
            if not isinstance(result, CALLERS_FAULTS):
                span.set_status(trace.StatusCode.ERROR, str(result))
            span.end()
            self.unanswered.pop(sequence, None)
        elif self.unanswered.get(sequence) == self._codec.answers(result):
            self.unanswered.pop(sequence, None)
        self._send(sequence, result)

    def _send(self, sequence: int, result: Any) -> None:
        self._outbox.append((sequence, result))
        self._wake.set()
        if len(self._outbox) > _MAX_UNREAD * max(1, len(self._live)):
            self._pause(True)

    def _pause(self, paused: bool) -> None:
        """Start or end backpressure. A paused stream reads no more requests, and its sequences compute nothing
        autonomously. The outbox stays bounded, because only entries that were already read add to it."""
        if paused == self.not_paused.is_set():
            (self.not_paused.clear if paused else self.not_paused.set)()
            self._loop.pause(self.number, paused)
            self._loop.post()

    def _event(self, result: Any) -> tuple[str, dict[str, Any]]:
        if isinstance(result, SpecdecError):
            return "ended", {"reason": result.reason, "message": str(result)}
        return type(result).__name__.lower(), self._codec.attributes(result)

    @property
    def _finished(self) -> bool:
        return self.failure is not None or (self._half_closed and not self.unanswered and not self._outbox)

    @property
    def busy(self) -> bool:
        """Whether sequences are live, or results are not yet sent to the peer."""
        return bool(self._live or self._outbox or self.writing)

    async def beat(self) -> None:
        """Cause heartbeats until cancelled. One timer per stream is cheaper than a timeout in every wait."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            if self.unanswered:
                self._heartbeat_due = True
                self._wake.set()

    async def content(self) -> tuple[list[tuple[int, Any]], list[int]] | None:
        """The results of the next frame, and the sequences of its heartbeat; None once the stream is finished."""
        while not (self._outbox or self._heartbeat_due or self._finished):
            self._wake.clear()
            await self._wake.wait()
        if self._finished:
            return None
        unanswered = sorted(self.unanswered) if self._heartbeat_due else []
        outbox, self._outbox, self._heartbeat_due = self._outbox, [], False
        self._pause(False)
        return outbox, unanswered
