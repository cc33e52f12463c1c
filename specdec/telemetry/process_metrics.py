"""Metrics of any process that serves: its CPU time, the lag of its event loop, and its asyncio tasks."""

from __future__ import annotations

import asyncio
import time

from specdec.telemetry.instruments import Instruments

_SAMPLE_EVERY_S = 0.25
_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0)


class ProcessMetrics:
    """``service`` is target, draft or orchestrator."""

    def __init__(self, service: str) -> None:
        self._attributes = {"service": service}
        instruments = Instruments()
        instruments.counter(
            "process.cpu.time",
            "s",
            "CPU time of the process, all threads",
            read=lambda: [(time.process_time(), self._attributes)],
        )
        instruments.gauge(
            "specdec.event_loop.tasks",
            "{task}",
            "Unfinished asyncio tasks",
            read=lambda: [(self._tasks(), self._attributes)],
        )
        self._lag = instruments.histogram(
            "specdec.event_loop.lag", "s", "Delay between the due time of a timer and its execution", bounds=_BOUNDS_S
        )
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Sample the lag of the event loop four times a second until ``stop``."""
        self._loop = asyncio.get_running_loop()
        self._task = asyncio.create_task(self._sample())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _tasks(self) -> int:
        return len(asyncio.all_tasks(self._loop)) if self._loop is not None else 0

    async def _sample(self) -> None:
        while True:
            due = time.monotonic() + _SAMPLE_EVERY_S
            await asyncio.sleep(_SAMPLE_EVERY_S)
            self._lag.record(max(0.0, time.monotonic() - due), self._attributes)
