"""Where the time of a run goes: what its services did meanwhile. Does not know the measurements."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from bench.harness.deployment import Processes, cpu_s
from bench.harness.endpoints import Endpoint, OverGrpc
from bench.harness.report import Columns
from bench.harness.runner import Ask, Request, Row, Run
from specdec.cli.processes import Service

_ORCHESTRATOR = "orchestrator"


@dataclass(frozen=True, slots=True)
class Explained:
    """An endpoint that adds to its runs the seconds in which the models of its services worked, and those of CPU."""

    endpoint: Endpoint
    services: Mapping[str, Service]
    processes: Processes

    def asks(self, **fields: Any) -> Ask:
        ask = self.endpoint.asks(**fields)

        async def explained(request: Request) -> Run:
            before = await asyncio.to_thread(self._used_s)
            run = await ask(request)
            after = await asyncio.to_thread(self._used_s)
            return replace(run, used_s={name: after[name] - seconds for name, seconds in before.items()})

        return explained

    def _used_s(self) -> dict[str, float]:
        """Since their starts."""
        used_s = {f"{name} CPU": cpu_s(service) for name, service in self.services.items()}
        for name, service in self.services.items():
            if name != _ORCHESTRATOR:
                used_s[f"{name} busy"] = self.processes.metric(service, "specdec_busy_seconds_total")
        return used_s


async def endpoint_of(
    processes: Processes, target: Sequence[str], draft: Sequence[str] = (), *flags: str, salted: bool = True
) -> Endpoint:
    """Of a deployment (see Processes.deployment), explained if its services have metrics. Raises StartError."""
    front, client = await processes.deployment(target, draft, *flags)
    endpoint = OverGrpc(client, salted)
    if not processes.with_metrics:
        return endpoint
    models = {"target": target, "draft": draft} if draft else {"target": target}
    services = {name: await processes.shared_model(command) for name, command in models.items()}
    return Explained(endpoint, {**services, _ORCHESTRATOR: front}, processes)


def _shown(row: Row, name: str, show: Callable[[float], str]) -> str:
    """Of the seconds of all runs; empty if they were not counted."""
    used_s = [run.used_s[name] for run in row.runs if name in run.used_s]
    return show(sum(used_s)) if used_s else ""


def _busy(row: Row, service: str) -> str:
    return _shown(row, f"{service} busy", lambda seconds: f"{seconds / row.seconds:.2f}")


def _cpu_us(row: Row, service: str) -> str:
    """Per round."""
    return _shown(row, f"{service} CPU", lambda seconds: f"{1e6 * seconds / max(1, row.total('num_rounds')):.0f}")


COLUMNS: Columns = {
    "busy": lambda row: _busy(row, "target"),
    "idle": lambda row: _shown(row, "target busy", lambda seconds: f"{max(0, 1 - seconds / row.seconds):.2f}"),
    "draft busy": lambda row: _busy(row, "draft"),
    "CPU: target": lambda row: _cpu_us(row, "target"),
    "draft": lambda row: _cpu_us(row, "draft"),
    _ORCHESTRATOR: lambda row: _cpu_us(row, _ORCHESTRATOR),
}
"""Of rows of explained endpoints."""
TITLE = "Shares of the wall time, and microseconds of CPU per round"
LEGEND = (
    "busy: the target works; idle: it does not, because its requests are drafted for or on their way; draft busy: the"
    " draft works, also while the target does; CPU per round: of each process, all of its threads"
)
