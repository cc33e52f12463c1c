"""Starts services as separate processes for the time of a measurement. Does not know the measurements."""

from __future__ import annotations

from contextlib import AsyncExitStack

from specdec.cli.processes import Service, free_ports, healthy, paired, service
from specdec.client import Client

_MAX_PROCESSES = 32


class Processes:
    """Started services; ``async with`` ends them in reverse order. Both methods raise StartError."""

    def __init__(self) -> None:
        # All at once: a port that no process listens on yet could be drawn again.
        self._ports = iter(free_ports(_MAX_PROCESSES))
        self._stack = AsyncExitStack()
        self._starting: list[Service] = []

    async def __aenter__(self) -> Processes:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def model(self, module: str, *flags: str) -> Service:
        """Start a model service without waiting; ``orchestrator`` waits for it. ``module`` may include an argument."""
        each = service(module, next(self._ports), [*flags, "--log-level=WARNING"])
        self._starting.append(await self._stack.enter_async_context(each))
        return self._starting[-1]

    async def orchestrator(self, *flags: str) -> tuple[Service, Client]:
        """Start an orchestrator. Returns when all services started so far are healthy and it uses its replicas."""
        while self._starting:
            await healthy(self._starting.pop())
        front = await self.model("orchestrator", *flags)
        await healthy(self._starting.pop())
        await paired(front)
        return front, await self._stack.enter_async_context(Client(front.address))
