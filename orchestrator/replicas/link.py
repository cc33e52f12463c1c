"""The orchestrator's end of one stream to a replica, shared by all sequences there.

Knows frames, lanes and the watchdog; does not know the meaning of entries, and the recovery of a sequence that loses
its lane. All entries between two writes go out as one frame.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any, Protocol

import grpc

from specdec.core.errors import Draining, InvalidArgument, PermissionDenied, ReplicaLost, SpecdecError
from specdec.core.rounds import Load
from specdec.transport.rpc import error_of
from specdec.transport.wire import read_load

_IDS_PER_FRAME = 1 << 16
"""Ids of opens per frame: far less than a message may have."""

_MANY_IDS, _MANY_IDS_S = 1 << 13, 10.0
"""A frame with this many ids may be in transit for this long."""


class Frames(Protocol):
    """A service's frames, seen from the caller. ``names``: the service names all waiting sequences every 250 ms."""

    names: bool

    def frame(self, opens: list[Any], entries: list[Any], closes: list[int]) -> Any: ...

    def results(self, response: Any) -> Iterable[tuple[int, Any]]:
        """(sequence, result or SpecdecError) pairs of a response frame. Raises InvalidArgument if it is malformed."""

    def named(self, response: Any) -> Iterable[int]:
        """The waiting sequences that the frame names."""


class Lane:
    """One sequence on a link. Only one task at a time may receive."""

    def __init__(self, link: Link, sequence: int) -> None:
        self.sequence = sequence
        self._link = link
        self._inbox: deque[tuple[float, Any]] = deque()  # with the time of arrival
        self._arrival: asyncio.Future[None] | None = None  # of the next result, while a task waits for it
        self._closed = False
        self.heard = 0.0  # arrival time of the result taken last; monotonic clock
        self.known: float | None = None
        """When the last entry was written, or the replica last showed that it has this entry. None: the entry is not
        written yet, or is an open, which may take long."""

    @property
    def waiting(self) -> bool:
        return self._arrival is not None

    @property
    def lost(self) -> bool:
        """Whether the whole stream has ended."""
        return self._link.lost

    def open(self, messages: Iterable[Any]) -> None:
        """``messages`` are taken when they are sent, a frame's worth at a time: a long prompt takes ms to write."""
        self._link.open(self.sequence, messages)

    def send(self, message: Any) -> None:
        self.known = None
        self._link.send(message)

    @property
    def arrived(self) -> bool:
        """Whether the next result has arrived."""
        return bool(self._inbox)

    async def receive(self, patience_s: float | None = None) -> Any:
        """The next result. Raises the SpecdecError that ended the sequence on this replica, or TimeoutError."""
        if not self._inbox:
            await self._arrive(patience_s)
        return self.take()

    async def arrives(self, within_s: float) -> bool:
        """Whether the next result has arrived, or arrives within ``within_s``."""
        if not self._inbox and within_s > 0:
            with suppress(TimeoutError):
                await self._arrive(within_s)
        return self.arrived

    def take(self) -> Any:
        """The next result, which has arrived. Raises as ``receive`` does."""
        self.heard, result = self._inbox.popleft()
        if isinstance(result, SpecdecError):
            self.close()
            raise result
        return result

    async def _arrive(self, patience_s: float | None) -> None:
        loop = asyncio.get_running_loop()
        self._arrival = arrival = loop.create_future()
        # Faster than a queue with asyncio.timeout: every round waits here twice.
        timer = loop.call_later(patience_s, _expire, arrival) if patience_s is not None else None
        try:
            await arrival
        finally:
            self._arrival = None
            if timer is not None:
                timer.cancel()

    def put(self, result: Any) -> None:
        self.known = now = time.monotonic()
        self._inbox.append((now, result))
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)

    def close(self) -> None:
        """End the sequence on the replica. Idempotent."""
        if not self._closed:
            self._closed = True
            self._link.leave(self)


def _expire(arrival: asyncio.Future[None]) -> None:
    if not arrival.done():
        arrival.set_exception(TimeoutError())


class Link:
    """An open stream. ``run`` carries it until it ends; every lane then gets the error, a SpecdecError."""

    def __init__(self, method: Callable[[], Any], frames: Frames, watchdog_s: float, stuck_after_s: float) -> None:
        self._method = method
        self._frames = frames
        self._watchdog_s = watchdog_s
        self._stuck_after_s = stuck_after_s
        self._lanes: dict[int, Lane] = {}
        self._next_sequence = 1
        self._opens: dict[int, Iterator[Any]] = {}  # by sequence, the messages that are not sent yet; the oldest first
        self._entries: list[Any] = []
        self._closes: list[int] = []
        self._wake = asyncio.Event()
        self._heard = self._moved = time.monotonic()
        self._many_ids_until = 0.0
        self._slowest_pass_s = 0.0
        self.load = Load()
        self.spoke = False  # a response has arrived
        self._lost: SpecdecError | None = None
        self.draining = False  # the replica takes no new sequences

    @property
    def num_lanes(self) -> int:
        return len(self._lanes)

    @property
    def lost(self) -> bool:
        return self._lost is not None

    def lane(self) -> Lane:
        """A lane for a new sequence."""
        if self._lost is not None:
            raise self._lost
        lane = Lane(self, self._next_sequence)
        self._next_sequence += 1
        self._lanes[lane.sequence] = lane
        return lane

    def open(self, sequence: int, messages: Iterable[Any]) -> None:
        self._opens[sequence] = iter(messages)
        self._wake.set()

    def send(self, entry: Any) -> None:
        self._entries.append(entry)
        self._wake.set()

    def leave(self, lane: Lane) -> None:
        if self._lanes.pop(lane.sequence, None) is not None:
            self._opens.pop(lane.sequence, None)
            self._entries = [message for message in self._entries if message.sequence != lane.sequence]
            self._closes.append(lane.sequence)
            self._wake.set()

    async def run(self) -> None:
        """Carry the stream until it ends. Raises the SpecdecError that ended it."""
        call = self._method()
        reader = asyncio.create_task(self._read(call))
        tasks = {reader, asyncio.create_task(self._write(call)), asyncio.create_task(self._watch())}
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if reader not in done:
                # A write to a stream that the server ended raises InvalidStateError; the read gets the status.
                done, _ = await asyncio.wait({reader}, timeout=0.1)
            self._lost = _why([*done, *(task for task in tasks if task.done())])
            raise self._lost
        finally:
            self._lost = self._lost or ReplicaLost("the stream was closed")
            for task in tasks:
                task.cancel()
            # A call that is dropped without cancel is never garbage-collected.
            call.cancel()
            for lane in list(self._lanes.values()):
                lane.put(self._lost)
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, call: Any) -> None:
        async for response in call:
            load = read_load(response.load)
            if load.passes != self.load.passes:
                self._moved = time.monotonic()
            self.load, self.spoke = load, True
            self._heard = time.monotonic()
            self._dispatch(response)

    async def _write(self, call: Any) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._opens or self._entries or self._closes:
                frame, sequences = self._next_frame()
                await call.write(frame)
                now = time.monotonic()
                for lane in filter(None, map(self._lanes.get, sequences)):
                    lane.known = now

    def _next_frame(self) -> tuple[Any, list[int]]:
        """The next frame, and the sequences with entries in it. It has all entries and closes, but only a part of the
        opens, so that a long prompt does not delay other sequences."""
        opens: list[Any] = []
        num_ids = 0
        while self._opens and num_ids < _IDS_PER_FRAME:
            sequence, messages = next(iter(self._opens.items()))
            if (message := next(messages, None)) is None:
                del self._opens[sequence]
                continue
            opens.append(message)
            num_ids += len(message.spec.token_ids)
        entries = [message for message in self._entries if message.sequence not in self._opens]
        self._entries = [message for message in self._entries if message.sequence in self._opens]
        closes, self._closes = self._closes, []
        if num_ids >= _MANY_IDS:
            self._many_ids_until = time.monotonic() + _MANY_IDS_S
        return self._frames.frame(opens, entries, closes), [message.sequence for message in entries]

    async def _watch(self) -> None:
        """The watchdog. Raises WatchdogFired if, while a lane waits, heartbeats are missing, or do not name a waiting
        sequence, or the replica's pass counter stands still.

        The time of an answer does not matter: a long prefill takes many passes.
        """
        looked = time.monotonic()
        # 0.75 + 1/16 of watchdog_s: a silent replica is given up within watchdog_s, after three missed heartbeats.
        every_s = self._watchdog_s / 16
        silence_s = 0.75 * self._watchdog_s
        while True:
            await asyncio.sleep(every_s)
            now = time.monotonic()
            if not self._waited_for or now - looked > self._watchdog_s / 2:
                # No lane waits, or this process itself stood still.
                self._heard = self._moved = now
                for lane in self._lanes.values():
                    lane.known = lane.known and now
            looked = now
            if now - self._heard > silence_s:
                raise WatchdogFired(f"nothing was heard of the replica for {now - self._heard:.1f} s")
            if self._frames.names and now > self._many_ids_until:
                known = [each.known for each in self._lanes.values() if each.waiting and each.known is not None]
                if known and now - min(known) > silence_s:
                    # The replica still sends: the connection is cut in one direction, towards the replica.
                    raise WatchdogFired(f"the replica does not know what it was told {now - min(known):.1f} s ago")
            if now - self._moved > max(self._stuck_after_s, 5 * self._slowest_pass_s):
                raise WatchdogFired(f"the replica made no pass for {now - self._moved:.1f} s", stood_still=True)

    @property
    def _waited_for(self) -> bool:
        return any(lane.waiting for lane in self._lanes.values())

    def observe_pass(self, pass_s: float) -> None:
        """A pass took this long. Remembers about the slowest of the last hundred."""
        self._slowest_pass_s = max(pass_s, 0.99 * self._slowest_pass_s)

    def _dispatch(self, response: Any) -> None:
        try:
            results = list(self._frames.results(response))
        except InvalidArgument as error:
            raise HostileReplica(f"the replica sent a malformed frame: {error}") from error
        for sequence in self._frames.named(response):
            if (lane := self._lanes.get(sequence)) is not None and lane.known is not None:
                lane.known = self._heard
        for sequence, result in results:
            self.draining = self.draining or isinstance(result, Draining)
            if (lane := self._lanes.get(sequence)) is not None:
                self._moved = self._heard
                lane.put(result)


class WatchdogFired(ReplicaLost):
    """The replica is silent, or ``stood_still``: it sends but makes no pass, which a request may have caused."""

    def __init__(self, message: str, stood_still: bool = False) -> None:
        super().__init__(message)
        self.stood_still = stood_still


class HostileReplica(ReplicaLost):
    """The replica broke the contract."""


def _why(tasks: Iterable[asyncio.Task[None]]) -> SpecdecError:
    """The error of the first of these ended tasks that has one."""
    for task in tasks:
        error = task.exception()
        if isinstance(error, SpecdecError):
            return error
        if isinstance(error, grpc.aio.AioRpcError):
            reason = error_of(error)
            # The status of the stream is not for clients: their sequences are replayed elsewhere.
            if isinstance(reason, PermissionDenied):
                return HostileReplica(f"it refuses this orchestrator: {reason}")
            return reason if isinstance(reason, ReplicaLost) else ReplicaLost(f"the stream ended: {reason}")
    return ReplicaLost("the replica ended the stream")
