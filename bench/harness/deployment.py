"""Services as processes of their own, for as long as something is measured. Refuses to know what that is."""

from __future__ import annotations

from contextlib import AsyncExitStack

from specdec.cli.processes import Service, free_ports, healthy, paired, service
from specdec.client import Client

_MOST = 32


class Processes:
    """``async with`` ends all that was started, the last first. Both ways to start raise StartError."""

    def __init__(self) -> None:
        # All at once, or one could be drawn again before somebody listens there.
        self._ports = iter(free_ports(_MOST))
        self._stack = AsyncExitStack()
        self._starting: list[Service] = []

    async def __aenter__(self) -> Processes:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def model(self, module: str, *flags: str) -> Service:
        """Under way; it has loaded what it serves when there is an orchestrator. ``module`` may bring an argument."""
        each = service(module, next(self._ports), [*flags, "--log-level=WARNING"])
        self._starting.append(await self._stack.enter_async_context(each))
        return self._starting[-1]

    async def orchestrator(self, *flags: str) -> tuple[Service, Client]:
        """Once it and all that was started before it are ready, and it uses those that it is told of."""
        while self._starting:
            await healthy(self._starting.pop())
        front = await self.model("orchestrator", *flags)
        await healthy(self._starting.pop())
        await paired(front)
        return front, await self._stack.enter_async_context(Client(front.address))
