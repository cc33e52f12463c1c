"""A TCP proxy that injects faults: latency, jitter, limited bandwidth, black holes, resets, truncation.

Knows bytes and time; does not know HTTP/2. It stands between an orchestrator and a replica, or a client and an
orchestrator. Faults may change while connections are open.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
from dataclasses import dataclass, field
from enum import Enum
from socket import SO_LINGER, SOL_SOCKET

_CHUNK_BYTES = 64 * 1024


class Direction(Enum):
    UP = "up"  # towards the server
    DOWN = "down"  # towards the client


@dataclass(slots=True)
class Faults:
    """Faults of one direction. ``hold`` is a black hole: it takes bytes and does not deliver them until it ends."""

    latency_s: float = 0.0
    jitter_s: float = 0.0  # uniform, added to the latency; bytes stay in order
    bytes_per_s: float = 0.0  # 0: unlimited
    hold: bool = False
    truncate_after: int | None = None  # number of bytes to deliver before the connection is reset


@dataclass(slots=True, eq=False)
class _Connection:
    client: asyncio.StreamWriter
    server: asyncio.StreamWriter

    def reset(self) -> None:
        for writer in (self.client, self.server):
            if (socket := writer.get_extra_info("socket")) is not None:
                with contextlib.suppress(OSError):
                    socket.setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()


@dataclass
class FaultProxy:
    """``async with FaultProxy(port) as proxy`` listens on ``proxy.port`` and forwards to ``upstream_port``."""

    upstream_port: int
    seed: int = 0
    port: int = 0
    faults: dict[Direction, Faults] = field(default_factory=lambda: {d: Faults() for d in Direction})
    refuse: bool = False

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._connections: set[_Connection] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    async def __aenter__(self) -> FaultProxy:
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def set(self, *directions: Direction, **changes: float | bool | int | None) -> None:
        """Change faults of ``directions`` (default: both) for bytes to come. Raises TypeError for an unknown fault."""
        for direction in directions or tuple(Direction):
            for name, value in changes.items():
                if name not in Faults.__dataclass_fields__:
                    raise TypeError(f"no fault is called {name}")
                setattr(self.faults[direction], name, value)
        self._changed.set()
        self._changed = asyncio.Event()

    def reset(self) -> None:
        """End every open connection with a TCP reset."""
        for connection in list(self._connections):
            connection.reset()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.refuse:
            writer.transport.abort()
            return
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self.upstream_port)
        except OSError:
            writer.transport.abort()
            return
        connection = _Connection(writer, up_writer)
        self._connections.add(connection)
        pumps = {
            asyncio.create_task(self._pump(reader, up_writer, Direction.UP, connection)),
            asyncio.create_task(self._pump(up_reader, writer, Direction.DOWN, connection)),
        }
        self._tasks |= pumps
        try:
            # asyncio logs an error for a handler that is cancelled when the program ends.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._tasks -= pumps
            self._connections.discard(connection)
            writer.close()
            up_writer.close()

    async def _pump(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        direction: Direction,
        connection: _Connection,
    ) -> None:
        """Forward bytes in one direction. A separate reader adds the due times, so latency does not limit bandwidth."""
        stamped: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(maxsize=256)
        stamping = asyncio.create_task(self._stamp(reader, stamped, direction))
        try:
            while True:
                due, data = await stamped.get()
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
                faults = self.faults[direction]
                while faults.hold:
                    await self._changed.wait()
                if faults.truncate_after is not None:
                    data = data[: faults.truncate_after]
                    faults.truncate_after -= len(data)
                    writer.write(data)
                    if faults.truncate_after == 0:
                        faults.truncate_after = None
                        await writer.drain()
                        connection.reset()
                        return
                elif not data:
                    return
                else:
                    writer.write(data)
                await writer.drain()
        except ConnectionError:
            return
        finally:
            stamping.cancel()
            await asyncio.gather(stamping, return_exceptions=True)

    async def _stamp(
        self, reader: asyncio.StreamReader, stamped: asyncio.Queue[tuple[float, bytes]], direction: Direction
    ) -> None:
        loop = asyncio.get_running_loop()
        due = 0.0
        while True:
            try:
                data = await reader.read(_CHUNK_BYTES)
            except ConnectionError:
                data = b""
            faults = self.faults[direction]
            delay = faults.latency_s + self._random.uniform(0.0, faults.jitter_s)
            # Bytes stay in order, and with limited bandwidth each chunk waits for the one before it.
            due = max(due, loop.time() + delay)
            if faults.bytes_per_s:
                due += len(data) / faults.bytes_per_s
            await stamped.put((due, data))
            if not data:
                return
