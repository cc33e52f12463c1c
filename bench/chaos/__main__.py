"""``specdec chaos [ROW ...]``: runs rows of the fault table and prints the observations."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import transformers
import typer
from rich.console import Console
from rich.table import Table

from bench.chaos import (
    casualties,
    clients,
    drafts,
    endurance,
    far_drafts,
    http_streams,
    ingress,
    network,
    overload,
    processes,
    protocol,
    restarts,
    scaling,
    security,
    starts,
    surroundings,
)
from bench.chaos.models import LanguageModels, Models, TableModels, tiny_pair
from bench.chaos.outcome import Outcome
from bench.harness.command import run_benchmark
from testing.lab import Lab

Row = Callable[[Lab, int, bool], Awaitable[Outcome]]

ROWS: dict[int, Row] = {
    int(name.removeprefix("row_")): row
    for module in (
        processes,
        network,
        drafts,
        endurance,
        far_drafts,
        http_streams,
        ingress,
        protocol,
        clients,
        overload,
        casualties,
        restarts,
        scaling,
        security,
        starts,
        surroundings,
    )
    for name, row in vars(module).items()
    if name.startswith("row_")
}

ANY_MODEL = frozenset({1, 3, 5, 14, 18, 21})
"""The rows that do not need the times and the planted faults of table models."""


class Engine(StrEnum):
    table = "table"
    torch = "torch"
    vllm = "vllm"


def done(row: Row) -> str:
    """The description of a row: the first paragraph of its docstring."""
    return " ".join((inspect.getdoc(row) or "").split("\n\n")[0].split())


async def run(number: int, seed: int, short: bool, models: Models | None = None) -> Outcome:
    """Run one row with one seed. An unexpected exception fails the row."""
    try:
        return await ROWS[number](Lab(seed, models), seed, short)
    except Exception as error:
        text = "".join(str(error).split("\n")[:6])
        return Outcome(failures=[f"{type(error).__name__}: {text}"[:500]])


def main(
    rows: Annotated[list[int] | None, typer.Argument(help="row numbers (default: all rows)")] = None,
    seed: Annotated[int, typer.Option(help="seed of the prompts and of the times of the faults")] = 1,
    seeds: Annotated[int, typer.Option(help="runs of each row, with seed, seed + 1, ...")] = 1,
    short: Annotated[bool, typer.Option("--short", help="a few seconds per row: fewer requests")] = False,
    engine: Annotated[Engine, typer.Option(help="table models, or tiny language models on an engine")] = Engine.table,
    json_file: Annotated[str | None, typer.Option("--json", help="file to write the outcomes to")] = None,
) -> None:
    """Break a deployment on purpose, row by row of the fault table. The exit status is 1 if a criterion is missed."""
    console = Console()
    if unknown := sorted(set(rows or ()) - ROWS.keys()):
        raise typer.BadParameter(f"no row {unknown[0]}; there are {', '.join(map(str, sorted(ROWS)))}")
    possible = ROWS.keys() if engine is Engine.table else ANY_MODEL
    if others := sorted(set(rows or ()) - possible):
        shown = ", ".join(map(str, sorted(possible)))
        raise typer.BadParameter(f"row {others[0]} needs table models; with engine {engine} there are {shown}")
    table = Table(header_style="bold", show_lines=True)
    for column in ("row", "fault", "observed", ""):
        table.add_column(column)
    outcomes = []
    with ExitStack() as stack:
        models: Models = TableModels()
        if engine is not Engine.table:
            transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
            directory = stack.enter_context(tempfile.TemporaryDirectory(prefix="specdec-chaos-"))
            models = LanguageModels(engine, tiny_pair(Path(directory)))
        for number, each in itertools.product(sorted(rows or possible), range(seed, seed + seeds)):
            started = time.monotonic()
            with console.status(f"row {number}, seed {each} ..."):
                outcome = asyncio.run(run(number, each, short, models))
            took_s = time.monotonic() - started
            verdict = "[green]pass[/]" if outcome.passed else "[red]FAIL[/]"
            console.print(f"row {number:>2} seed {each} {verdict} {took_s:5.1f} s", highlight=False)
            failures = [*outcome.failures, *outcome.slow]
            for failure in failures:
                console.print(f"    {failure}", highlight=False, markup=False)
            seen = "\n".join([*outcome.seen, *(f"FAILED: {failure}" for failure in failures)])
            table.add_row(f"{number}\nseed {each}", done(ROWS[number]), seen.replace("[", r"\["), verdict)
            outcomes.append(
                {"row": number, "seed": each, "passed": outcome.passed, "seconds": round(took_s, 1)}
                | {"seen": outcome.seen, "failures": failures, "figures": outcome.figures}
            )
            if json_file:  # after each row, so that an interrupted run keeps its outcomes
                with open(json_file, "w") as file:
                    json.dump(outcomes, file, indent=1)
    console.print(table)
    failed = sum(not outcome["passed"] for outcome in outcomes)
    console.print(f"{len(outcomes) - failed} passed, {failed} failed", highlight=False)
    raise typer.Exit(1 if failed else 0)


if __name__ == "__main__":
    run_benchmark(main)
