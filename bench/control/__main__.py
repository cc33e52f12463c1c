"""``specdec bench control``: arguments, the runs side by side, and the output."""

from __future__ import annotations

import json
import os
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.control import report
from bench.control.grid import Result, measured, points
from bench.harness.command import run_benchmark


def main(
    every: Annotated[int, typer.Option(min=1, help="measure one deployment in so many")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="file to write the results to")] = None,
) -> None:
    """Simulate the policy over a grid of deployments, next to fixed numbers of draft tokens."""
    console = Console()
    grid = list(points())
    chosen = random.Random(1).sample(grid, len(grid) // every)
    columns = (TextColumn("Simulating"), BarColumn(40), MofNCompleteColumn(), TimeElapsedColumn())
    results: list[Result] = []
    with Progress(*columns, console=console, transient=True) as progress, ProcessPoolExecutor(os.cpu_count()) as pool:
        task = progress.add_task("", total=len(chosen))
        for result in pool.map(measured, chosen, chunksize=4):
            results.append(result)
            progress.advance(task)
    console.print(report.summary(results))
    console.print(report.heat_map(results, lambda result: result.over_best, "Over the best fixed K"))
    if slow := report.slower_than_alone(results):
        console.print(f"\nSlower than the target alone by more than is allowed, {len(slow)} of {len(results)}:")
        for result in slow:
            console.print(f"  {result.over_alone:.2f}  {result.point.name}", highlight=False)
    console.print_json(json.dumps(report.ratios(results)))
    if json_file is not None:
        lines = ",\n".join(json.dumps(result.as_json()) for result in results)
        json_file.write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    run_benchmark(main)
