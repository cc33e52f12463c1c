"""A pair behind its services, perhaps one of table models, with a proxy in front of the draft that delays every byte.

Knows processes, cores and distances; does not know the comparisons.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from bench.harness.deployment import Processes, pin, pinned_here
from bench.harness.endpoints import OverGrpc
from specdec.speculation.acceptance import PRIOR
from testing.fault_proxy import FaultProxy

Command = tuple[str, ...]
"""A service's module and flags."""


@dataclass(frozen=True, slots=True)
class Served:
    """How a pair is served. ``unrelated`` is a draft that has nothing in common with the target (empty: none).

    ``computes``: each model needs a core.
    """

    target: Command
    draft: Command
    unrelated: Command = ()
    computes: bool = False


@dataclass(frozen=True, slots=True)
class TableCosts:
    """Costs of the table pair. ``pass_ms``: a target pass. ``row_us``: each row of it, a hundredth of a pass, so that
    trees are not free. ``step_ms``: a draft pass of any size. ``runner_up``: how often the second candidate is right if
    the first is wrong, as with real pairs (bench/LOG.md, 2026-11-22)."""

    pass_ms: float = 40.0
    step_ms: float = 4.0
    acceptance: float = 0.8
    runner_up: float = PRIOR[1]
    row_us: float = 400.0


def served_tables(costs: TableCosts) -> Served:
    target, draft = ("testing.table_service target", "testing.table_service draft")
    candidates = (f"--acceptance={costs.acceptance}", f"--runner-up={costs.runner_up}")
    step = f"--pass-ms={costs.step_ms}"
    return Served(
        (target, f"--pass-ms={costs.pass_ms}", f"--row-us={costs.row_us}", *candidates),
        (draft, step, *candidates),
        (draft, step, "--acceptance=0", "--runner-up=0"),
    )


@dataclass(slots=True)
class Lab:
    """Running services: each orchestrator by name, and the proxy in front of the draft."""

    endpoints: dict[str, OverGrpc]
    proxy: FaultProxy

    def move_draft(self, round_trip_ms: float) -> None:
        self.proxy.set(latency_s=round_trip_ms / 2e3)

    def lose_draft(self) -> None:
        """Make the draft unreachable for the orchestrators: reset its streams and refuse new connections."""
        if not self.proxy.refuse:
            self.proxy.refuse = True
            self.proxy.reset()


@asynccontextmanager
async def lab(served: Served, num_ahead_tokens: int) -> AsyncIterator[Lab]:
    """Healthy, connected services. Raises StartError.

    If the pair computes, its target has core 0 to itself; everything else, also this process, runs on core 1.
    """
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(Processes())
        target, draft = [await processes.shared_model(service) for service in (served.target, served.draft)]
        proxy = await stack.enter_async_context(FaultProxy(draft.port))
        near = f"127.0.0.1:{proxy.port}"
        fronts = {"near": (near, 0), "ahead": (near, num_ahead_tokens)}
        others = [draft]
        if served.unrelated:
            others.append(await processes.shared_model(served.unrelated))
            fronts["unrelated"] = (others[-1].address, num_ahead_tokens)
        endpoints = {}
        for name, (address, ahead) in fronts.items():
            flags = [f"--target={target.address}", f"--draft={address}", f"--num-ahead-tokens={ahead}"]
            front, client = await processes.orchestrator(*flags)
            endpoints[name] = OverGrpc(client, salted=served.computes)
            others.append(front)
        if served.computes:
            pin(target.process.pid, {0})
            for service in others:
                pin(service.process.pid, {1})
            stack.enter_context(pinned_here({1}))
        yield Lab(endpoints, proxy)
