"""Several processes of one service on one port (SO_REUSEPORT), and their parent: it starts again what has died, lets
all of them end in order, and adds up their metrics.

Each of them is the whole service; the system gives each new connection to one of them. Knows processes; does not know
what they serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager

from specdec.core.settings import FrontSettings
from specdec.telemetry.summed_metrics import SummedMetrics
from specdec.transport import rpc

log = logging.getLogger(__name__)

_BAD_SETTINGS = 2
"""The exit status of a service that cannot run as it is asked to. To start it again does not help."""

_FIRST_PAUSE_S, _MAX_PAUSE_S, _LIVED_S = 0.1, 5.0, 10.0
"""Between the end of a process and its next start: twice as long each time, unless it lived for some seconds."""

_ORPHANED_POLL_S = 1.0
_ITS_OWN = ("port", "metrics-port", "processes", "shared-port", "http-port")
"""Flags that are another process's or the parent's."""


async def signalled(settings: FrontSettings) -> None:
    """Wait for SIGTERM or SIGINT, or, in one of several processes, for the end of their parent."""
    if not settings.shared_port:
        await rpc.signalled()
        return
    parent, signal = os.getppid(), asyncio.create_task(rpc.signalled())
    while os.getppid() == parent and not signal.done():
        await asyncio.wait({signal}, timeout=_ORPHANED_POLL_S)
    signal.cancel()


async def serve_by_several(module: str, settings: FrontSettings, until: Callable[[int], Awaitable[None]]) -> None:
    """Serve by ``settings.processes`` processes of ``python -m module``, with the arguments of this one, which is their
    parent, as long as ``until`` takes, which gets the port. Raises as ProcessGroup does, and what ``until`` raises."""
    async with ProcessGroup(module, sys.argv[1:], settings) as group:
        log.info("serving", extra={"address": settings.address(group.port), "processes": settings.processes})
        waits = [asyncio.ensure_future(until(group.port)), asyncio.ensure_future(group.failed())]
        done, pending = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        log.info("draining")
    log.info("stopped")
    for wait in done:
        wait.result()


class ProcessGroup:
    """``settings.processes`` processes of ``python -m module`` with the ``arguments`` of this one. ``async with`` runs
    them. Raises OSError if nothing can listen on the port, ValueError if not on that of the metrics."""

    def __init__(self, module: str, arguments: Sequence[str], settings: FrontSettings) -> None:
        safe_path = ["-P"] if sys.flags.safe_path else []
        # Bound, but not listening, it keeps the port while all processes are away, and gets no connections.
        self._socket = _bound(settings.host, settings.port)
        self.port = int(self._socket.getsockname()[1])
        self._command = [sys.executable, *safe_path, "-m", module, *_without(arguments, _ITS_OWN)]
        self._command += [f"--port={self.port}", "--shared-port"]
        of_parent = {f"SPECDEC_{flag.upper().replace('-', '_')}" for flag in _ITS_OWN}
        self._environment = {name: value for name, value in os.environ.items() if name not in of_parent}
        self._settings = settings
        self._metrics = SummedMetrics() if settings.metrics_port is not None else None
        self._processes: dict[int, asyncio.subprocess.Process] = {}

    async def __aenter__(self) -> ProcessGroup:
        if self._metrics is not None and self._settings.metrics_port is not None:
            port = self._metrics.serve(self._settings.host, self._settings.metrics_port)
            log.info("metrics", extra={"address": self._settings.address(port)})
        self._tasks = [asyncio.create_task(self._keep(number)) for number in range(self._settings.processes)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    async def failed(self) -> None:
        """Wait until a process cannot run at all. Raises ValueError."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _keep(self, number: int) -> None:
        pause_s, loop = _FIRST_PAUSE_S, asyncio.get_running_loop()
        while True:
            started = loop.time()
            async with self._process(number) as process:
                status = await process.wait()
            if status == _BAD_SETTINGS:
                raise ValueError(f"process {number} ended with status {status}, and says why above")
            log.error("a process has ended; it is started again", extra={"number": number, "status": status})
            pause_s = _FIRST_PAUSE_S if loop.time() - started > _LIVED_S else min(2 * pause_s, _MAX_PAUSE_S)
            await asyncio.sleep(pause_s)

    @asynccontextmanager
    async def _process(self, number: int) -> AsyncIterator[asyncio.subprocess.Process]:
        """A process. At the end it is asked to end, and has its own grace period to do so."""
        flags = []
        if self._metrics is not None:
            metrics_port = _free_port(self._settings.host)
            self._metrics.begin(number, self._settings.address(metrics_port))
            flags = [f"--metrics-port={metrics_port}"]
        process = await asyncio.create_subprocess_exec(*self._command, *flags, env=self._environment)
        log.info("process started", extra={"number": number, "pid": process.pid})
        try:
            yield process
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.terminate()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), self._settings.shutdown_grace_s + 5)
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


def _without(arguments: Sequence[str], names: Iterable[str]) -> list[str]:
    """The arguments without these flags, as ``--name=value`` or ``--name value``."""
    flags = {f"--{name}" for name in names}
    left, is_value = [], False
    for argument in arguments:
        name, has_value, _ = argument.partition("=")
        if name in flags:
            is_value = not has_value
        elif is_value and not argument.startswith("--"):
            is_value = False
        else:
            left.append(argument)
            is_value = False
    return left


def _bound(host: str, port: int) -> socket.socket:
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    holder = socket.socket(family, kind, protocol)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        holder.bind(address)
    except OSError:
        holder.close()
        raise
    return holder


def _free_port(host: str) -> int:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.bind(address)
        return int(probe.getsockname()[1])
