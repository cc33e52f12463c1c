"""``specdec bench plan``: compares the simulation of ``specdec plan`` with the real services.

Table models run behind the real services, with a fault proxy in front of the draft; this process is the load. First the
costs of passes and of the message path are measured on this machine, with other pass times. Then each cell is measured,
simulated from these costs, and compared.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from bench.harness.command import run_benchmark
from bench.harness.deployment import Processes
from bench.micro.pass_cost import draft_step_time, target_pass_time
from specdec.cli.processes import StartError
from specdec.client import Client
from specdec.planner.scenario import Deployment, Drafting, Pair, Paths, Scenario, Workload
from specdec.planner.simulation import simulate
from specdec.speculation.acceptance import PRIOR
from testing.fault_proxy import FaultProxy

_NUM_AHEAD = 60
_SEEDS = 8
_MESSAGE_PATH_REPEATS = 3
_PROMPT_TOKENS = 3
_MAX_WORK_S = 4e-3


@dataclass(frozen=True, slots=True)
class Models:
    """The table pair. ``pass_ms`` and ``step_ms``: how long a target pass and a draft step sleep."""

    pass_ms: float
    step_ms: float
    acceptance: float
    runner_up: float = PRIOR[1]


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the grid: ``streams`` requests that start together, each with ``tokens`` output tokens."""

    streams: int
    num_draft_tokens: int
    ahead: bool
    round_trip_ms: float
    tokens: int


@dataclass(frozen=True, slots=True)
class Speed:
    tokens_per_s: float
    ms_per_token: float  # between a request's first and last token; the median of the requests


@dataclass(frozen=True, slots=True)
class Row:
    cell: Cell
    measured: Speed
    simulated: Speed

    @property
    def misses(self) -> tuple[float, float]:
        """Relative error of the simulated tokens/s and of the simulated time per token."""
        return (
            self.simulated.tokens_per_s / self.measured.tokens_per_s - 1,
            self.simulated.ms_per_token / self.measured.ms_per_token - 1,
        )


def main(
    pass_ms: Annotated[float, typer.Option(help="milliseconds of a pass of the table target")] = 60.0,
    step_ms: Annotated[float, typer.Option(help="milliseconds of a step of the table draft")] = 6.0,
    acceptance: Annotated[float, typer.Option(help="acceptance rate of the table pair")] = 0.8,
    runner_up: Annotated[float, typer.Option(help="how often a second candidate is right if not the first")] = PRIOR[1],
    streams: Annotated[list[int] | None, typer.Option(help="concurrent requests; may be repeated")] = None,
    round_trip_ms: Annotated[list[float] | None, typer.Option(help="round trip to the draft; may be repeated")] = None,
    rounds: Annotated[int, typer.Option(help="approximate rounds per stream and run; more for few streams")] = 20,
    repeats: Annotated[int, typer.Option(help="runs of each cell; medians are compared")] = 3,
    json_file: Annotated[str | None, typer.Option("--json", help="file to write the figures to")] = None,
) -> None:
    """Measure a small deployment and compare it with its simulation."""
    console = Console()
    models = Models(pass_ms, step_ms, acceptance, runner_up)
    cells = [
        Cell(count, k, ahead, away_ms, _tokens(_rounds(rounds, count, k), k, acceptance))
        for away_ms in round_trip_ms or [0.0, 20.0]
        for count in streams or [1, 4, 16, 64]
        for k, ahead in ((0, False), (4, False), (6, False), (4, True))
    ]
    try:
        paths, rows = asyncio.run(_compare(console, models, cells, repeats))
    except StartError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(1) from error
    console.print(_table(rows))
    worst = max(abs(miss) for row in rows for miss in row.misses)
    result = {
        "overhead_ms": round(paths.overhead_s * 1e3, 3),
        "work_ms": round(paths.work_s * 1e3, 3),
        "worst_miss": round(worst, 3),
    }
    console.print_json(json.dumps(result))
    if json_file:
        found = {"rows": [asdict(row) | {"misses": row.misses} for row in rows], **result}
        Path(json_file).write_text(json.dumps(found, indent=1) + "\n")


def _rounds(rounds: int, streams: int, num_draft_tokens: int) -> int:
    """Rounds per stream. Few streams need more: their acceptance varies. So do short runs, those without a draft."""
    return rounds * (2 if not num_draft_tokens else max(1, 8 // (streams + 1)))


def _tokens(rounds: int, num_draft_tokens: int, acceptance: float) -> int:
    return round(rounds * sum(acceptance**depth for depth in range(num_draft_tokens + 1)))


def _table(rows: Sequence[Row]) -> Table:
    table = Table(box=None, header_style="bold")
    for column in ("draft", "streams", "K", "tokens/s", "plan", "off by", "ms/token", "plan", "off by"):
        table.add_column(column, justify="left" if column == "draft" else "right")
    for row in rows:
        of_rate, of_time = row.misses
        table.add_row(
            f"{row.cell.round_trip_ms:g} ms",
            str(row.cell.streams),
            f"{row.cell.num_draft_tokens}{' ahead' if row.cell.ahead else ''}",
            f"{row.measured.tokens_per_s:.1f}",
            f"{row.simulated.tokens_per_s:.1f}",
            f"{of_rate:+.1%}",
            f"{row.measured.ms_per_token:.1f}",
            f"{row.simulated.ms_per_token:.1f}",
            f"{of_time:+.1%}",
        )
    return table


async def _compare(console: Console, models: Models, cells: Sequence[Cell], repeats: int) -> tuple[Paths, list[Row]]:
    with console.status("Measuring the passes ...") as status:
        target, draft = target_pass_time(models.pass_ms / 1e3), draft_step_time(models.step_ms / 1e3)
        status.update("Measuring the message path ...")
        paths = await _message_path(replace(models, pass_ms=models.pass_ms / 2, step_ms=models.step_ms / 2))
        console.print(
            f"On this machine ({os.cpu_count()} cores): RPC overhead {paths.overhead_s * 1e3:.2f} ms per exchange and "
            f"{paths.work_s * 1e3:.2f} ms per additional sequence; a pass {target.seconds(1) * 1e3:.1f} and "
            f"{target.seconds(320) * 1e3:.1f} ms (1 and 320 rows), a step {draft.seconds(1) * 1e3:.1f} and "
            f"{draft.seconds(64) * 1e3:.1f} ms (1 and 64 rows).",
            highlight=False,
        )
        pair = Pair(target, draft, models.acceptance, models.runner_up)
        rows = []
        async with _lab(models) as lab:
            for cell in cells:
                status.update(f"{cell.streams} streams, K = {cell.num_draft_tokens}, {cell.round_trip_ms:g} ms ...")
                rows.append(Row(cell, await lab.measure(cell, repeats), _simulated(cell, pair, paths)))
    return paths, rows


def _simulated(cell: Cell, pair: Pair, paths: Paths, seeds: int = _SEEDS) -> Speed:
    """The simulated speed of a cell, the mean over ``seeds`` seeds."""
    outcomes = [
        simulate(
            Scenario(
                pair,
                Paths(cell.round_trip_ms / 1e3, paths.overhead_s, paths.work_s),
                Deployment(),
                Workload(_PROMPT_TOKENS, cell.tokens, cell.streams, streams=cell.streams),
                Drafting(cell.num_draft_tokens, _NUM_AHEAD if cell.ahead else 0),
                seed,
            )
        )
        for seed in range(seeds)
    ]
    return Speed(
        statistics.fmean(outcome.tokens_per_s for outcome in outcomes),
        statistics.fmean(outcome.per_token_s[0] for outcome in outcomes) * 1e3,
    )


async def _message_path(models: Models) -> Paths:
    """The part of a round that is neither a pass nor a step, measured with other pass times than the cells have."""
    target, draft = target_pass_time(models.pass_ms / 1e3), draft_step_time(models.step_ms / 1e3)
    few, many = (
        Cell(count, 4, False, 0.0, _tokens(rounds, 4, models.acceptance)) for count, rounds in ((1, 60), (64, 20))
    )
    async with _lab(models) as lab:
        round_s = await lab.seconds_per_round(few, _MESSAGE_PATH_REPEATS)
        crowd = await lab.measure(many, _MESSAGE_PATH_REPEATS)
    exchange_s = max(0.0, round_s - target.seconds(5) - 4 * draft.seconds(1)) / 2
    # Bisection: a larger share of work per answer slows many streams down. One stream does not show it: all processes
    # share a few cores here, and many streams may need more core time per answer.
    low, high = 0.0, _MAX_WORK_S
    for _ in range(8):
        work_s = (low + high) / 2
        paths = Paths(0.0, max(0.0, exchange_s - work_s), work_s)
        found = _simulated(many, Pair(target, draft, models.acceptance, models.runner_up), paths, seeds=1)
        low, high = (work_s, high) if found.tokens_per_s > crowd.tokens_per_s else (low, work_s)
    return paths


@dataclass(slots=True)
class _Lab:
    """Running services. ``clients`` is keyed by whether the orchestrator lets the draft grow ahead."""

    clients: dict[bool, Client]
    proxy: FaultProxy
    seed: int = 0

    async def measure(self, cell: Cell, repeats: int = 1) -> Speed:
        """Tokens per second and time per token of a cell, medians over ``repeats`` runs after a warm-up."""
        self.proxy.set(latency_s=cell.round_trip_ms / 2e3)
        await self._run(cell, 12)
        runs = [await self._run(cell, cell.tokens) for _ in range(repeats)]
        return Speed(
            statistics.median(cell.streams * cell.tokens / seconds for _, _, seconds in runs),
            statistics.median(statistics.median_high(times) for times, _, _ in runs) * 1e3,
        )

    async def seconds_per_round(self, cell: Cell, repeats: int = 1) -> float:
        """Seconds per round of a cell with one stream, the median over ``repeats`` runs after a warm-up."""
        self.proxy.set(latency_s=cell.round_trip_ms / 2e3)
        await self._run(cell, 12)
        runs = [await self._run(cell, cell.tokens) for _ in range(repeats)]
        return statistics.median(times[0] * (cell.tokens - 1) / (rounds - 1) for times, rounds, _ in runs)

    async def _run(self, cell: Cell, tokens: int) -> tuple[list[float], int, float]:
        """Seconds per token of each stream, the number of rounds of all, and the wall-clock seconds of the run."""
        client, times, rounds = self.clients[cell.ahead], [], 0
        self.seed += 1

        async def one(index: int) -> None:
            nonlocal rounds
            first = last = 0.0
            async for response in client.stream(
                token_ids={"token_ids": [1 + index, 2 + self.seed, 3]},
                max_tokens=tokens,
                temperature=0.0,
                num_draft_tokens=cell.num_draft_tokens,
            ):
                if response.HasField("chunk"):
                    last = time.perf_counter()
                    first = first or last
                    if response.chunk.HasField("finish"):
                        rounds += response.chunk.finish.speculation.num_rounds
            times.append((last - first) / (tokens - 1))

        started = time.perf_counter()
        await asyncio.gather(*(one(index) for index in range(cell.streams)))
        return times, rounds, time.perf_counter() - started


@asynccontextmanager
async def _lab(models: Models) -> AsyncIterator[_Lab]:
    async with Processes() as made:
        guesses = (f"--acceptance={models.acceptance}", f"--runner-up={models.runner_up}")
        target = await made.model("testing.table_service target", f"--pass-ms={models.pass_ms}", *guesses)
        draft = await made.model("testing.table_service draft", f"--pass-ms={models.step_ms}", *guesses)
        async with FaultProxy(draft.port) as proxy:
            clients = {}
            for ahead in (False, True):
                _, clients[ahead] = await made.orchestrator(
                    f"--target={target.address}",
                    f"--draft=127.0.0.1:{proxy.port}",
                    f"--num-ahead-tokens={_NUM_AHEAD if ahead else 0}",
                )
            yield _Lab(clients, proxy)


if __name__ == "__main__":
    run_benchmark(main)
