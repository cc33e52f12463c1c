"""Every watcher is told of every change of health, and none holds up another."""

from __future__ import annotations

import asyncio
from typing import Any

from grpc_health.v1 import health_pb2

from specdec.transport.health import Health

_Status = health_pb2.HealthCheckResponse
ASKED = health_pb2.HealthCheckRequest(service="a")


class Watcher:
    """Reads once ``may_read`` is set."""

    def __init__(self, health: Health, reads: bool = True) -> None:
        self.told: list[int] = []
        self.may_read = asyncio.Event()
        if reads:
            self.may_read.set()
        self.watch = asyncio.create_task(health.Watch(ASKED, self))

    async def write(self, response: Any) -> None:
        await self.may_read.wait()
        self.told.append(response.status)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_watcher_is_told_the_status_and_every_change():
    health = Health()
    watcher = Watcher(health)
    await settled()
    for serving in (False, True, True):
        health.tell("a", serving)
        health.tell("b", not serving)
        await settled()
    assert watcher.told == [_Status.SERVICE_UNKNOWN, _Status.NOT_SERVING, _Status.SERVING]
    watcher.watch.cancel()


async def test_a_watcher_that_does_not_read_holds_up_no_change():
    health = Health()
    health.tell("a", True)
    stuck, other = Watcher(health, reads=False), Watcher(health)
    await settled()
    health.tell("a", False)
    await settled()
    assert other.told == [_Status.SERVING, _Status.NOT_SERVING]
    assert (await health.Check(ASKED, None)).status == _Status.NOT_SERVING
    stuck.may_read.set()
    await settled()
    assert stuck.told == [_Status.SERVING, _Status.NOT_SERVING]
    for watcher in (stuck, other):
        watcher.watch.cancel()
