"""One sequence on a stream to a replica: what is sent to it, what has arrived, and how much more may come.

Knows the order of its results; does not know frames, other sequences, and what a result means.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol

from orchestrator.replicas.allowances import SPARE
from specdec.core.errors import SpecdecError


class Stream(Protocol):
    """What carries a lane (orchestrator.replicas.link.Link)."""

    @property
    def lost(self) -> bool: ...

    def open(self, sequence: int, messages: Iterable[Any]) -> None: ...

    def send(self, entry: Any) -> None: ...

    def leave(self, lane: Lane) -> None: ...


class Lane:
    """One sequence on a link. Only one task at a time may receive."""

    def __init__(self, stream: Stream, sequence: int) -> None:
        self.sequence = sequence
        self._stream = stream
        self._inbox: deque[tuple[float, Any]] = deque()  # with the time of arrival
        self._arrival: asyncio.Future[None] | None = None  # of the next result, while a task waits for it
        self._closed = False
        self.allowance = SPARE  # entries that the replica may still send
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
        return self._stream.lost

    def open(self, messages: Iterable[Any], allows: int) -> None:
        """``messages`` are taken when they are sent, a frame's worth at a time: a long prompt takes ms to write.
        ``allows``: entries of the answer."""
        self.allowance += allows
        self._stream.open(self.sequence, messages)

    def send(self, message: Any, allows: int) -> None:
        """``allows``: entries of the answer."""
        self.allowance += allows
        self.known = None
        self._stream.send(message)

    @property
    def arrived(self) -> bool:
        """Whether the next result has arrived."""
        return bool(self._inbox)

    async def receive(self, patience_s: float | None = None) -> Any:
        """The next result. Raises the SpecdecError that ended the sequence on this replica, or TimeoutError."""
        if not self._inbox:
            await self._arrive(patience_s)
        return self.next_result()

    async def arrives(self, within_s: float) -> bool:
        """Whether the next result has arrived, or arrives within ``within_s``."""
        if not self._inbox and within_s > 0:
            with suppress(TimeoutError):
                await self._arrive(within_s)
        return self.arrived

    def next_result(self) -> Any:
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
            self._stream.leave(self)


def _expire(arrival: asyncio.Future[None]) -> None:
    if not arrival.done():
        arrival.set_exception(TimeoutError())
