"""A deployment with services found by DNS name, as in a cluster: each process has its own address, and all processes of
a role share a port. Knows names and addresses; does not know the faults.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import AsyncExitStack

from specdec.cli.processes import StartError, free_ports
from specdec.client import Client
from testing.dns import Names
from testing.lab import Lab, Process, start, until

_PASS_MS = {"target": 8, "draft": 1}


class Named:
    """A named deployment. ``async with`` starts the DNS server and stops everything. Raises StartError without root.

    ``show`` publishes the processes in ``roles`` under the name of their role.
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
            raise StartError("a DNS server for the deployment needs root and mount namespaces")
        async with AsyncExitStack() as stack:
            self.names = await stack.enter_async_context(names)
            self._make = await stack.enter_async_context(self._lab.processes())
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self, prefix: Sequence[str] = ()) -> None:
        """Start all processes, each under the command ``prefix``. Returns when the orchestrator uses all replicas."""
        self._prefix = [*self.names.prefix, *prefix]
        for role, count in (("target", self._num_targets), ("draft", 1), ("orchestrator", 1)):
            for _ in range(count):
                self.add(role)
            self.show(role)
        await start(*self.processes)
        [front] = self.roles["orchestrator"]
        self.client = await self._stack.enter_async_context(Client(front.address))
        if await self.used(front) == float("inf"):
            raise StartError(f"the orchestrator does not use all replicas: {await self.client.server_info()}")

    def add(self, role: str) -> Process:
        """Add one more process of ``role``; it is neither started nor published."""
        if role == "orchestrator":
            module = role
            flags = [f"--{name}={name}:{self._ports[name]}" for name in _PASS_MS]
        else:
            module = f"testing.table_service {role}"
            flags = [f"--pass-ms={_PASS_MS[role]}"]
        host = f"{self.names.network}.{next(self._numbers)}"
        self.roles[role].append(self._make(module, *flags, prefix=self._prefix, host=host, port=self._ports[role]))
        return self.roles[role][-1]

    def show(self, role: str) -> None:
        """Publish the addresses of all processes of ``role`` under its name."""
        self.names.addresses[role] = [each.address.split(":")[0] for each in self.roles[role]]

    @property
    def processes(self) -> list[Process]:
        return list(itertools.chain(*self.roles.values()))

    async def used(self, orchestrator: Process, timeout_s: float = 30.0) -> float:
        """Seconds until the orchestrator uses every model service; infinity on a timeout."""
        wanted = len(self.roles["target"]) + len(self.roles["draft"])
        async with Client(orchestrator.address) as client:

            async def ready() -> bool:
                return sum(each.ready for each in (await client.server_info()).replicas) == wanted

            return await until(ready, timeout_s)
