"""Where the time of a run goes: what its services did meanwhile. Does not know the measurements."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
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
    """An endpoint whose runs have the seconds in which the models of its services worked, and those of CPU."""

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


def _busy(row: Row, service: str) -> float | None:
    """The share of the wall time; None without such a service."""
    used_s = [run.used_s[name] for run in row.runs if (name := f"{service} busy") in run.used_s]
    return sum(used_s) / sum(run.seconds for run in row.runs) if used_s else None


def _share(share: float | None) -> str:
    return "" if share is None else f"{share:.2f}"


def _idle(row: Row) -> float | None:
    busy = _busy(row, "target")
    return None if busy is None else max(0.0, 1 - busy)


def _cpu_us(row: Row, service: str) -> str:
    used_s = [run.used_s[name] for run in row.runs if (name := f"{service} CPU") in run.used_s]
    num_rounds = row.total("num_rounds")
    return f"{1e6 * sum(used_s) / num_rounds:.0f}" if used_s and num_rounds else ""


COLUMNS: Columns = {
    "busy": lambda row: _share(_busy(row, "target")),
    "idle": lambda row: _share(_idle(row)),
    "draft busy": lambda row: _share(_busy(row, "draft")),
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
