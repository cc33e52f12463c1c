"""What is known of the processes at one address: whether the present one serves, and which ones have ended.

Knows instances; does not know streams and models.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc


class Health:
    """``serving``: the health service of the present process. An instance is the id of a process."""

    def __init__(self) -> None:
        self.serving = True
        self._dead: set[str] = set()  # instances that are known to have ended
        self._draining: set[str] = set()  # instances that announced their end: those did not crash
        self._fate_known = asyncio.Event()  # set when a connection attempt shows whether the process is alive

    def start_stream(self) -> None:
        """Connected: the fate of this process is not known any more."""
        self.serving = True
        self._fate_known.clear()

    def note_draining(self, instance: str) -> None:
        self._draining.add(instance)

    def note_attempt(self, last: str | None, alive: str | None) -> None:
        """A connection attempt reached the instance ``alive``, or no process (None): another ``last`` one has ended."""
        if last is not None and last not in (alive, *self._draining):
            self._dead.add(last)
        self._fate_known.set()

    async def is_dead(self, instance: str, timeout_s: float) -> bool:
        """Whether this process has ended. Waits up to ``timeout_s`` for a connection attempt that shows it."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._fate_known.wait()
        return instance in self._dead

    async def watch(self, channel: grpc.aio.Channel, instance: str, changed: Callable[[], None]) -> None:
        """Watch the health service. NOT_SERVING: no new sequences; open ones continue."""
        call = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        try:
            async for response in call:
                self.serving = response.status == health_pb2.HealthCheckResponse.SERVING
                if self.serving:
                    self._draining.discard(instance)  # it did not end after all: a long pass made it NOT_SERVING
                else:
                    self._draining.add(instance)
                changed()
        except grpc.aio.AioRpcError:
            self.serving = True  # without a health watch: the end of the stream shows itself
            changed()
        finally:
            call.cancel()
