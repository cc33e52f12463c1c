"""``specdec bench distance``: arguments, the order of things, and where results go."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.distance import table
from bench.distance.formula import Prediction, predictions
from bench.distance.lab import lab
from bench.distance.modes import Mode
from bench.distance.pairs import Pair, PairName, TableCosts, make
from bench.distance.plan import Block, blocks, measure
from bench.distance.ratios import ratios
from bench.distance.row import Row
from specdec.processes import StartError

_COSTS = TableCosts()


def main(
    pair: Annotated[
        PairName, typer.Option(help="table: passes that sleep; damped, bundled: real models; all: one after the other")
    ] = PairName.table,
    pass_ms: Annotated[float, typer.Option(help="of the table target")] = _COSTS.pass_ms,
    step_ms: Annotated[float, typer.Option(help="of the table draft, for one node or many")] = _COSTS.step_ms,
    acceptance: Annotated[float, typer.Option(help="of the table pair")] = _COSTS.acceptance,
    num_ahead_tokens: Annotated[int, typer.Option(help="the orchestrator's setting in the mode ahead")] = 60,
    tokens: Annotated[int, typer.Option(help="per run")] = 160,
    repeats: Annotated[int, typer.Option(help="runs of each mode, in turns; medians are shown")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="one short run each: within 4 minutes")] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="write the figures here")] = None,
    chart: Annotated[str | None, typer.Option(help="draw the figures here (PNG; needs the extra bench)")] = None,
) -> None:
    """Compare target alone, a synchronous draft and one that grows ahead, at growing distances to the draft."""
    # Ended like by Ctrl-C, so that the services end, too.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    if quick:
        tokens, repeats = min(tokens, 80), 1
    costs = TableCosts(pass_ms, step_ms, acceptance)
    names = [each for each in PairName if each is not PairName.all] if pair is PairName.all else [pair]
    rows: list[Row] = []
    labels: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="specdec-distance-") as directory:
        for name in names:
            made = make(name, Path(directory), costs)
            labels[name.value] = made.label
            console.print(f"{made.label}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", highlight=False)
            try:
                rows += asyncio.run(_measure(console, made, num_ahead_tokens, tokens, repeats, quick))
            except StartError as error:
                console.print(str(error), markup=False)
                raise typer.Exit(1) from error
    predicted = predictions(rows)
    _show(console, rows, predicted)
    figures = ratios(rows)
    console.print_json(json.dumps(figures))
    if json_file:
        result = {
            "pair": pair.value,
            "labels": labels,
            "rows": [asdict(row) for row in rows],
            "formula": [asdict(each) for each in predicted],
            "ratios": figures,
        }
        Path(json_file).write_text(json.dumps(result, indent=1) + "\n")
    if chart:
        from bench.distance.chart import draw

        draw(rows, predicted, labels, Path(chart))


def _show(console: Console, rows: Sequence[Row], predicted: Sequence[Prediction]) -> None:
    for name, temperature, some in table.sections(rows):
        console.print(table.results(some, f"{name}, T = {temperature:g}"))
        console.print()
    console.print(table.LEGEND, style="dim", highlight=False)
    for name, temperature, some in table.sections(rows):
        console.print()
        console.print(table.hits_by_depth(some, f"foreseen verdicts: {name}, T = {temperature:g}"))
    console.print()
    console.print(table.formula(predicted))


async def _measure(
    console: Console, pair: Pair, num_ahead_tokens: int, tokens: int, repeats: int, quick: bool
) -> list[Row]:
    plan = blocks(pair, quick)
    rows: list[Row] = []
    columns = (
        TextColumn("{task.description:<36}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("Starting the services", total=sum(len(b.modes) for b in plan) * (1 + repeats))
        async with lab(pair, num_ahead_tokens) as running:
            for block in plan:
                where = _where(block)

                def done(mode: Mode, where: str = where) -> None:
                    progress.update(task, advance=1, description=f"{where}: {mode.name}")

                progress.update(task, description=where)
                found = await measure(running, block, tokens, repeats, done)
                speeds = ", ".join(f"{row.mode} {row.tokens_per_s:.1f}" for row in found)
                progress.console.print(f"  {where}: {speeds}", highlight=False)
                rows += found
    return rows


def _where(block: Block) -> str:
    return f"{block.situation}, T = {block.temperature:g}"


if __name__ == "__main__":
    typer.run(main)
