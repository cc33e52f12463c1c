"""Starts services as separate processes for the time of a measurement. Does not know the measurements."""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from specdec.cli.processes import Service, free_ports, healthy, paired, service
from specdec.client import Client

_MAX_PORTS = 128


def cpu_s(service: Service) -> float:
    """Processor seconds that a service has used, user and system."""
    fields = Path(f"/proc/{service.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Processes:
    """Started services; ``async with`` ends them in reverse order. All methods that start one raise
    StartError. ``with_metrics``: ``metric`` can be called."""

    def __init__(self, with_metrics: bool = False) -> None:
        self.with_metrics = with_metrics
        self._metrics_ports: dict[str, int] = {}  # by address
        # All at once: a port that no process listens on yet could be drawn again.
        self._ports = iter(free_ports(_MAX_PORTS))
        self._stack = AsyncExitStack()
        self._starting: list[Service] = []
        self._shared: dict[tuple[str, ...], Service] = {}

    async def __aenter__(self) -> Processes:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def model(self, module: str, *flags: str) -> Service:
        """Start a model service without waiting; ``orchestrator`` waits for it. ``module`` may include an argument."""
        metrics_port = next(self._ports)
        metrics = [f"--metrics-port={metrics_port}"] if self.with_metrics else []
        starting = service(module, next(self._ports), [*flags, *metrics, "--log-level=WARNING"])
        self._starting.append(started := await self._stack.enter_async_context(starting))
        self._metrics_ports[started.address] = metrics_port
        return started

    def metric(self, service: Service, name: str) -> float:
        """Of the first series. Blocks until the service answers."""
        metrics_port = self._metrics_ports[service.address]
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(name)).split()[-1])

    async def shared_model(self, command: Sequence[str]) -> Service:
        """The service of a module and its flags, which is started once."""
        key = tuple(command)
        if key not in self._shared:
            self._shared[key] = await self.model(*key)
        return self._shared[key]

    async def orchestrator(self, *flags: str) -> tuple[Service, Client]:
        """Start an orchestrator. Returns when all services started so far are healthy and it uses its replicas."""
        while self._starting:
            await healthy(self._starting.pop())
        front = await self.model("orchestrator", *flags)
        await healthy(self._starting.pop())
        await paired(front)
        return front, await self._stack.enter_async_context(Client(front.address))

    async def deployment(self, target: Sequence[str], draft: Sequence[str] = (), *flags: str) -> tuple[Service, Client]:
        """Start an orchestrator of a target and a draft (empty: none), which equal deployments share. ``target`` and
        ``draft`` are each a module and its flags; ``flags`` are the orchestrator's."""
        addresses = [f"--target={(await self.shared_model(target)).address}"]
        addresses += [f"--draft={(await self.shared_model(draft)).address}"] if draft else []
        return await self.orchestrator(*addresses, *flags)


@contextmanager
def pinned_here(cores: Iterable[int]) -> Iterator[None]:
    """Pin this process, which runs the clients, to ``cores``."""
    before = os.sched_getaffinity(0)
    pin(os.getpid(), cores)
    try:
        yield
    finally:
        pin(os.getpid(), before)


def pin(process: int, cores: Iterable[int]) -> None:
    """Pin all threads of a process to ``cores``, if the machine has at least two."""
    if (os.cpu_count() or 1) > 1:
        for thread in Path(f"/proc/{process}/task").iterdir():
            os.sched_setaffinity(int(thread.name), cores)
