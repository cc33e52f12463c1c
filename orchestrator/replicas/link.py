"""The orchestrator's end of one stream to a replica, shared by all sequences there.

Knows frames and the watchdog; does not know the meaning of entries, and the recovery of a sequence that loses
its lane. All entries between two writes go out as one frame.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import grpc

from orchestrator.replicas.allowances import Heartbeats, Leftover
from orchestrator.replicas.lane import Lane
from specdec.core.errors import Draining, InvalidArgument, PermissionDenied, ReplicaLost, SpecdecError
from specdec.core.rounds import Load
from specdec.transport.rpc import error_of
from specdec.transport.wire import read_load

log = logging.getLogger(__name__)

_IDS_PER_FRAME = 1 << 16
"""Ids of opens per frame: far less than a message may have."""

_MANY_IDS, _MANY_IDS_S = 1 << 13, 10.0
"""A frame with this many ids may be in transit for this long."""


_ENTRIES_PER_TURN = 8192
"""Entries of a frame that are taken before other tasks run (see orchestrator.replicas.allowances): 4 ms for nodes. The
verdicts of 256 sequences are fewer, so that their next rounds go out together."""


class Frames(Protocol):
    """A service's frames, seen from the caller. ``names``: the service names all waiting sequences every 250 ms."""

    names: bool

    def frame(self, opens: list[Any], entries: list[Any], closes: list[int]) -> Any: ...

    def entries(self, response: Any) -> Iterable[tuple[int, int, Callable[[], Any]]]:
        """The results of a response frame: the sequence, the size in entries, and how to read it: as a result or
        SpecdecError. This and reading raise InvalidArgument if the frame is malformed."""

    def heartbeats(self, response: Any) -> Sequence[Any]:
        """The heartbeats of waiting sequences, each with its ``sequence``."""


class Link:
    """An open stream. ``run`` carries it until it ends; every lane then gets the error, a SpecdecError."""

    def __init__(self, method: Callable[[], Any], frames: Frames, watchdog_s: float, stuck_after_s: float) -> None:
        self._method = method
        self._frames = frames
        self._watchdog_s = watchdog_s
        self._stuck_after_s = stuck_after_s
        self._lanes: dict[int, Lane] = {}
        self._next_sequence = 1
        self._max_lanes = 0
        self._opens: dict[int, Iterator[Any]] = {}  # by sequence, the messages that are not sent yet; the oldest first
        self._entries: list[Any] = []
        self._closes: list[int] = []
        self._wake = asyncio.Event()
        self._heard = self._moved = time.monotonic()
        self._heartbeats = Heartbeats(self._heard)
        self._of_closed = Leftover(self._heard)
        self._many_ids_until = 0.0
        self._slowest_pass_s = 0.0
        self.load = Load()
        self.num_others = 0  # open sequences of other orchestrators, by the last report
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
        self._max_lanes = max(self._max_lanes, len(self._lanes))
        return lane

    def open(self, sequence: int, messages: Iterable[Any]) -> None:
        self._opens[sequence] = iter(messages)
        self._wake.set()

    def send(self, entry: Any) -> None:
        self._entries.append(entry)
        self._wake.set()

    def leave(self, lane: Lane) -> None:
        if self._lanes.pop(lane.sequence, None) is not None:
            self._of_closed.add_unused(lane.allowance, time.monotonic())
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
            self.num_others = max(0, load.live_sequences - len(self._lanes))
            self._heard = time.monotonic()
            await self._dispatch(response)

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
        polled = time.monotonic()
        # 0.75 + 1/16 of watchdog_s: a silent replica is given up within watchdog_s, after three missed heartbeats.
        every_s = self._watchdog_s / 16
        silence_s = 0.75 * self._watchdog_s
        while True:
            await asyncio.sleep(every_s)
            now = time.monotonic()
            if not self._waited_for or now - polled > self._watchdog_s / 2:
                # No lane waits, or this process itself stood still.
                self._heard = self._moved = now
                for lane in self._lanes.values():
                    lane.known = lane.known and now
            polled = now
            if now - self._heard > silence_s:
                raise WatchdogFired(f"nothing was heard of the replica for {now - self._heard:.1f} s")
            if self._frames.names and now > self._many_ids_until:
                waiting = (lane for lane in self._lanes.values() if lane.waiting)
                known_at = min((lane.known for lane in waiting if lane.known is not None), default=now)
                if now - known_at > silence_s:
                    # The replica still sends: the connection is cut in one direction, towards the replica.
                    raise WatchdogFired(f"the replica does not know what it was told {now - known_at:.1f} s ago")
            if now - self._moved > max(self._stuck_after_s, 5 * self._slowest_pass_s):
                raise WatchdogFired(f"the replica made no pass for {now - self._moved:.1f} s", stood_still=True)

    @property
    def _waited_for(self) -> bool:
        return any(lane.waiting for lane in self._lanes.values())

    def observe_pass(self, pass_s: float) -> None:
        """A pass took this long. Remembers about the slowest of the last hundred."""
        self._slowest_pass_s = max(pass_s, 0.99 * self._slowest_pass_s)

    async def _dispatch(self, response: Any) -> None:
        """Hand over a frame, a part in each turn of the event loop."""
        self._count_heartbeats(self._frames.heartbeats(response))
        room, answers = _ENTRIES_PER_TURN, False
        try:
            for sequence, size, read in self._frames.entries(response):
                answers = True
                self._deliver(sequence, size, read)
                room -= size
                if room <= 0:
                    room = _ENTRIES_PER_TURN
                    await asyncio.sleep(0)
        except InvalidArgument as error:
            raise HostileReplica(f"the replica sent a malformed frame: {error}") from error
        if not answers:
            self._use_heartbeats(1.0)

    def _count_heartbeats(self, heartbeats: Sequence[Any]) -> None:
        self._use_heartbeats(len(heartbeats) / (1 + self._max_lanes))
        for heartbeat in heartbeats:
            if (lane := self._lanes.get(heartbeat.sequence)) is not None and lane.known is not None:
                lane.known = self._heard

    def _use_heartbeats(self, share: float) -> None:
        if not self._heartbeats.use(share, self._heard):
            raise HostileReplica("the replica floods the stream with heartbeats")

    def _deliver(self, sequence: int, size: int, read: Callable[[], Any]) -> None:
        """A result of ``size`` entries. It is not read before it is known to be allowed."""
        if (lane := self._lanes.get(sequence)) is not None:
            lane.allowance -= size
            left = lane.allowance
        else:
            left = self._of_closed.use(size)
        if left < 0:
            raise HostileReplica(f"the replica sent {-left} entries more than it was asked for")
        if lane is not None:
            result = read()
            self.draining = self.draining or isinstance(result, Draining)
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
        error = ReplicaLost("its task was cancelled") if task.cancelled() else task.exception()
        if isinstance(error, SpecdecError):
            return error
        if isinstance(error, grpc.aio.AioRpcError):
            reason = error_of(error)
            # The status of the stream is not for clients: their sequences are replayed elsewhere.
            if isinstance(reason, PermissionDenied):
                return HostileReplica(f"it refuses this orchestrator: {reason}")
            return reason if isinstance(reason, ReplicaLost) else ReplicaLost(f"the stream ended: {reason}")
        if error is not None and not isinstance(error, asyncio.InvalidStateError):  # of a write after the end
            log.error("a stream ended by an error of this process", exc_info=error)
    return ReplicaLost("the replica ended the stream")
