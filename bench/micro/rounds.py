"""``specdec bench rounds``: the overhead of a round without the models, from 1 to 1,024 concurrent sequences.

Target, draft and orchestrator are separate processes around table models that take no time; this process is the load.
So all measured time is message path: gRPC, protobuf, asyncio, the engines and the loop. The same processes with gRPC
alone (bench.micro.bare_rounds) are measured in the same run.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from dataclasses import asdict, dataclass
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from bench.harness.command import run_benchmark
from bench.harness.deployment import Processes, cpu_s
from bench.micro.bare_rounds import bare_round_ms
from specdec.cli.processes import Service, free_ports
from specdec.client import Client

_PROMPT = {"token_ids": [1, 2, 3, 4]}


@dataclass(frozen=True, slots=True)
class Row:
    """The figures for one number of concurrent sequences. Overheads are per round of a sequence, seen by its client."""

    sequences: int
    rounds_per_s: float
    tokens_per_s: float
    overhead_ms_p50: float
    overhead_ms_p99: float
    cpu_us_target: float
    cpu_us_draft: float
    cpu_us_orchestrator: float

    @property
    def cpu_us_busiest(self) -> float:
        return max(self.cpu_us_target, self.cpu_us_draft, self.cpu_us_orchestrator)


def main(
    num_draft_tokens: Annotated[int, typer.Option(help="draft tokens per round")] = 4,
    acceptance: Annotated[float, typer.Option(help="acceptance rate of the table pair")] = 0.8,
    rounds: Annotated[int, typer.Option(help="approximate rounds per table row")] = 6000,
    repeats: Annotated[int, typer.Option(help="runs of each table row; medians are shown")] = 3,
    sequences: Annotated[list[int] | None, typer.Option(help="concurrent sequences; may be repeated")] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="file to write the figures to")] = None,
) -> None:
    """Measure the message path with table models that take no time."""
    console = Console()
    counts = sequences or [1, 4, 16, 64, 256, 1024]
    bare_ms = statistics.median(bare_round_ms(rounds // 3, free_ports(3)) for _ in range(repeats))
    rows = uvloop.run(_measure(console, counts, num_draft_tokens, acceptance, rounds, repeats))
    table = Table(box=None, header_style="bold")
    for column in ("sequences", "rounds/s", "tokens/s", "ms p50", "ms p99", "target", "draft", "orchestrator"):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            f"{row.sequences:.0f}",
            f"{row.rounds_per_s:.0f}",
            f"{row.tokens_per_s:.0f}",
            f"{row.overhead_ms_p50:.2f}",
            f"{row.overhead_ms_p99:.2f}",
            *(f"{cpu:.0f} us" for cpu in (row.cpu_us_target, row.cpu_us_draft, row.cpu_us_orchestrator)),
        )
    console.print(table)
    console.print(f"CPU time per round and process; K = {num_draft_tokens}; {os.cpu_count()} cores", highlight=False)
    console.print(f"gRPC alone, one sequence: {bare_ms:.2f} ms a round", highlight=False)
    result = {
        "rows": [asdict(row) for row in rows],
        "bare_ms": bare_ms,
        "ratios": _ratios({row.sequences: row for row in rows}, bare_ms),
    }
    console.print_json(json.dumps(result["ratios"]))
    if json_file:
        with open(json_file, "w") as file:
            json.dump(result, file, indent=1)


def _ratios(rows: dict[int, Row], bare_ms: float) -> dict[str, float]:
    ratios = {}
    if 1 in rows:
        ratios["overhead_ms_per_round_1"] = round(rows[1].overhead_ms_p50, 3)
        ratios["overhead_over_bare_1"] = round(rows[1].overhead_ms_p50 / bare_ms, 2)
    if 64 in rows:
        ratios["rounds_per_s_64"] = round(rows[64].rounds_per_s)
    if 256 in rows:
        ratios["cpu_us_per_round_256"] = round(rows[256].cpu_us_busiest)
    return ratios


async def _measure(
    console: Console, counts: list[int], num_draft_tokens: int, acceptance: float, rounds: int, repeats: int
) -> list[Row]:
    async with Processes() as processes:
        pair = f"--acceptance={acceptance}"
        module = "testing.table_service"
        target, draft = [await processes.model(f"{module} {role}", pair) for role in ("target", "draft")]
        orchestrator, client = await processes.orchestrator(
            f"--target={target.address}", f"--draft={draft.address}", f"--max-live-sequences={max(counts)}"
        )
        services = [target, draft, orchestrator]
        rows = []
        await _load(client, min(counts), 400, num_draft_tokens)
        for count in counts:
            with console.status(f"{count} sequences ..."):
                runs = [await _row(client, services, count, rounds, num_draft_tokens) for _ in range(repeats)]
            of_runs = zip(*(asdict(run).values() for run in runs), strict=True)
            rows.append(Row(*(statistics.median(values) for values in of_runs)))
        return rows


async def _row(client: Client, services: list[Service], count: int, rounds: int, num_draft_tokens: int) -> Row:
    cpu_before = [cpu_s(service) for service in services]
    started = time.perf_counter()
    tokens, gaps = await _load(client, count, max(8, rounds // count), num_draft_tokens)
    wall_s = time.perf_counter() - started
    cpu_us = [(cpu_s(service) - before) * 1e6 for service, before in zip(services, cpu_before, strict=True)]
    num_rounds = len(gaps) + count
    ordered = sorted(gaps)
    return Row(
        count,
        num_rounds / wall_s,
        tokens / wall_s,
        ordered[len(ordered) // 2] * 1e3,
        ordered[len(ordered) * 99 // 100] * 1e3,
        *(cpu / num_rounds for cpu in cpu_us),
    )


async def _load(client: Client, count: int, rounds: int, num_draft_tokens: int) -> tuple[int, list[float]]:
    """Run ``count`` sequences of about ``rounds`` rounds. The tokens received, and the seconds between rounds."""
    gaps: list[float] = []
    tokens = 0

    async def one(seed: int) -> None:
        nonlocal tokens
        last = 0.0
        # Each round commits 1 to K + 1 tokens, about 3.4 with an acceptance rate of 0.8 and K = 4.
        max_tokens = rounds * 3
        async for response in client.stream(
            token_ids=_PROMPT, max_tokens=max_tokens, seed=seed, num_draft_tokens=num_draft_tokens
        ):
            if response.HasField("chunk"):
                now = time.perf_counter()
                tokens += len(response.chunk.token_ids)
                if last:
                    gaps.append(now - last)
                last = now

    await asyncio.gather(*(one(seed) for seed in range(count)))
    return tokens, gaps


if __name__ == "__main__":
    run_benchmark(main)
