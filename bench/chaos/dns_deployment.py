"""A deployment whose services are found by name, as in a cluster: each process has an address of its own, and all of a
role have one port. Knows names and addresses; refuses to know what befalls them.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack

from bench.chaos.dns import Names
from bench.chaos.lab import Lab, Process, until
from specdec.cli.processes import StartError, free_ports
from specdec.client import Client

_PASS_MS = {"target": 8, "draft": 1}


class Named:
    """``async with`` starts one of each (and more targets), and stops all. Raises StartError where that is not allowed.

    Processes of ``roles`` are listed under their role's name after ``show``.
    """

    client: Client

    def __init__(self, lab: Lab, num_targets: int = 1) -> None:
        self.roles: dict[str, list[Process]] = {"target": [], "draft": [], "orchestrator": []}
        self._lab = lab
        self._num_targets = num_targets
        self._ports = dict(zip(self.roles, free_ports(3), strict=True))
        self._numbers = itertools.count(100)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Named:
        if (names := await Names.create({})) is None:
            raise StartError("a name service of its own needs root and mount namespaces")
        async with AsyncExitStack() as stack:
            self.names = await stack.enter_async_context(names)
            self._make = await stack.enter_async_context(self._lab.processes())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self, prefix: Sequence[str] = ()) -> None:
        """``prefix``: what every process is run under. Returns when the orchestrator uses all."""
        self._prefix = [*self.names.prefix, *prefix]
        for role, count in (("target", self._num_targets), ("draft", 1), ("orchestrator", 1)):
            for _ in range(count):
                await self.add(role).start()
            self.show(role)
        for each in self.everybody:
            await each.healthy()
        [front] = self.roles["orchestrator"]
        self.client = await self._stack.enter_async_context(Client(front.address))
        if await self.used(front) == float("inf"):
            raise StartError(f"the orchestrator does not use all replicas: {await self.client.server_info()}")

    def add(self, role: str) -> Process:
        """One more, neither started nor listed."""
        if role == "orchestrator":
            module = role
            flags = [f"--{name}={name}:{self._ports[name]}" for name in _PASS_MS]
        else:
            module = f"bench.models.table_service {role}"
            flags = [f"--pass-ms={_PASS_MS[role]}"]
        host = f"{self.names.network}.{next(self._numbers)}"
        self.roles[role].append(self._make(module, *flags, prefix=self._prefix, host=host, port=self._ports[role]))
        return self.roles[role][-1]

    def show(self, role: str) -> None:
        """The name of a role has the addresses of all its processes from now on."""
        self.names.addresses[role] = [each.address.split(":")[0] for each in self.roles[role]]

    @property
    def everybody(self) -> list[Process]:
        return list(itertools.chain(*self.roles.values()))

    async def used(self, orchestrator: Process, timeout_s: float = 30.0) -> float:
        """Seconds until it used every model service there is."""
        wanted = len(self.roles["target"]) + len(self.roles["draft"])
        async with Client(orchestrator.address) as client:

            async def ready() -> bool:
                return sum(each.ready for each in (await client.server_info()).replicas) == wanted

            return await until(ready, timeout_s)
