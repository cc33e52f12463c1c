"""``specdec bench priorities``: what interactive requests lose beside many batch requests, and what these lose.

A table model answers, behind the real services. The loads, by turns: the interactive requests alone, the batch
requests alone, and both, as they are and with the priority standard for all. Each request that ends is followed by
another. Every text is compared.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Shown

from bench.harness.command import run_benchmark
from bench.harness.deployment import Processes
from bench.harness.report import conclude
from specdec.client import Client, Sample
from specdec.core.sequence import Priority, SamplingParams, SequenceSpec
from testing.table_model import Table

PASS_MS = 160.0
"""So long that the services and this client have little to do beside it, also with some hundred requests."""
_PROMPT_IDS, _TOKENS = 32, 40
_WARM_UP_S, _MEASURED_S = 10.0, 25.0
_TABLE = Table()


@dataclass(slots=True)
class Kind:
    """The requests of one kind, and their figures. ``longest_gap_s``: without a message to one of them."""

    priority: Priority
    num_live: int
    per_token_s: list[float] = field(default_factory=list)
    longest_gap_s: float = 0.0
    num_tokens: int = 0
    num_wrong: int = 0

    def clear(self) -> None:
        self.per_token_s.clear()
        self.longest_gap_s, self.num_tokens = 0.0, 0


@dataclass(frozen=True, slots=True)
class Measured:
    """Milliseconds per token (the median of requests; 0: there were none), the longest time without a message to one
    request, and tokens per second, of the interactive and of the batch requests."""

    interactive_ms: float
    interactive_gap_ms: float
    interactive_per_s: float
    batch_ms: float
    batch_gap_ms: float
    batch_per_s: float
    wrong_texts: int


async def _ask_again_and_again(client: Client, kind: Kind, number: int) -> None:
    for turn in range(1_000_000):
        ids = [1 + (7 * number + turn) % 1000, int(kind.priority), number % 1000] + [5] * _PROMPT_IDS
        fields: dict[str, Any] = {
            "token_ids": {"token_ids": ids},
            "max_tokens": _TOKENS,
            "temperature": 0.0,
            "num_draft_tokens": 0,
        }
        sample, first, last = Sample(), 0.0, time.perf_counter()
        async with aclosing(client.stream(**fields, priority=int(kind.priority))) as responses:
            async for response in responses:
                if not response.HasField("chunk"):
                    continue
                now = time.perf_counter()
                first = first or now
                kind.longest_gap_s = max(kind.longest_gap_s, now - last)
                last = now
                kind.num_tokens += len(response.chunk.token_ids)
                sample.add(response.chunk)
        kind.per_token_s.append((last - first) / (_TOKENS - 1))
        spec = SequenceSpec(tuple(ids), len(ids), SamplingParams(temperature=0.0))
        kind.num_wrong += sample.token_ids != _TABLE.text(spec, _TOKENS)


async def _measure(client: Client, interactive: Kind, batch: Kind) -> Measured:
    kinds = (interactive, batch)
    tasks = [
        asyncio.create_task(_ask_again_and_again(client, kind, number))
        for kind in kinds
        for number in range(kind.num_live)
    ]
    try:
        await asyncio.wait(tasks, timeout=_WARM_UP_S, return_when=asyncio.FIRST_EXCEPTION)
        for kind in kinds:
            kind.clear()
        started = time.perf_counter()
        ended, _ = await asyncio.wait(tasks, timeout=_MEASURED_S, return_when=asyncio.FIRST_EXCEPTION)
        seconds = time.perf_counter() - started
        for task in ended:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    figures = [
        (1e3 * statistics.median(kind.per_token_s or [0.0]), 1e3 * kind.longest_gap_s, kind.num_tokens / seconds)
        for kind in kinds
    ]
    return Measured(*figures[0], *figures[1], sum(kind.num_wrong for kind in kinds))


@asynccontextmanager
async def _client(rows_per_pass: int, num_live: int) -> AsyncIterator[Client]:
    row_us = 1e3 * PASS_MS / rows_per_pass
    async with Processes() as processes:
        target = await processes.model("testing.table_service target", f"--pass-ms={PASS_MS}", f"--row-us={row_us}")
        flags = [f"--target={target.address}", f"--max-live-sequences={2 * num_live}"]
        _, client = await processes.orchestrator(*flags)
        yield client


async def measure(num_interactive: int, num_batch: int, rows_per_pass: int, repeats: int) -> dict[str, list[Measured]]:
    """By load. ``rows_per_pass``: so many rows double the time of a pass."""
    loads = {
        "interactive alone": (num_interactive, 0, Priority.INTERACTIVE, Priority.BATCH),
        "batch alone": (0, num_batch, Priority.INTERACTIVE, Priority.BATCH),
        "both": (num_interactive, num_batch, Priority.INTERACTIVE, Priority.BATCH),
        "both, all standard": (num_interactive, num_batch, Priority.STANDARD, Priority.STANDARD),
    }
    measured: dict[str, list[Measured]] = {name: [] for name in loads}
    async with _client(rows_per_pass, num_interactive + num_batch) as client:
        for _ in range(repeats):
            for name, (first, second, *priorities) in loads.items():
                kinds = [Kind(priority, num) for priority, num in zip(priorities, (first, second), strict=True)]
                measured[name].append(await _measure(client, *kinds))
    return measured


def _median(of_load: Sequence[Measured], figure: str) -> float:
    value: float = statistics.median(getattr(measured, figure) for measured in of_load)
    return value


def shown(measured: dict[str, list[Measured]]) -> Shown:
    alone_ms = _median(measured["interactive alone"], "interactive_ms")
    alone_per_s = _median(measured["batch alone"], "batch_per_s")
    names = ("", "ms a token", "over alone", "longest gap", "batch: tokens/s", "over alone", "longest gap")
    table = Shown(header_style="bold", box=None, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for name, of_load in measured.items():
        token_ms, per_s = _median(of_load, "interactive_ms"), _median(of_load, "batch_per_s")
        gaps = [max(getattr(each, figure) for each in of_load) for figure in ("interactive_gap_ms", "batch_gap_ms")]
        interactive = [f"{token_ms:.1f}", f"{token_ms / alone_ms:.2f} x", f"{gaps[0]:.0f} ms"] if token_ms else [""] * 3
        batch = [f"{per_s:.0f}", f"{per_s / alone_per_s:.2f} x", f"{gaps[1]:.0f} ms"] if per_s else [""] * 3
        table.add_row(name, *interactive, *batch)
    return table


def main(
    interactive: Annotated[int, typer.Option(min=1, help="interactive requests at the same time")] = 8,
    batch: Annotated[int, typer.Option(min=1, help="batch requests at the same time")] = 200,
    rows_per_pass: Annotated[int, typer.Option(min=1, help="rows that double the time of a pass")] = 1000,
    repeats: Annotated[int, typer.Option(min=1, help="turns; medians are shown")] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write the figures to a file")
    ] = None,
) -> None:
    """Time per token of interactive requests and tokens per second of batch requests, alone and together."""
    console = Console(highlight=False)
    with console.status("measuring ..."):
        measured = asyncio.run(measure(interactive, batch, rows_per_pass, repeats))
    console.print(
        f"Table model: {PASS_MS:g} ms a pass, twice that with {rows_per_pass} rows; {interactive} interactive and"
        f" {batch} batch requests of {_TOKENS} tokens; {os.cpu_count()} cores"
    )
    console.print(shown(measured))
    num_wrong = sum(each.wrong_texts for of_load in measured.values() for each in of_load)
    figures = {name: [asdict(each) for each in of_load] for name, of_load in measured.items()}
    conclude(console, json_file, figures, num_wrong=num_wrong)


if __name__ == "__main__":
    run_benchmark(main)
