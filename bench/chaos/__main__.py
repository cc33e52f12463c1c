"""``specdec chaos [ROW ...]``: runs rows of the fault table and prints the observations."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import json
import tempfile
import time
from collections.abc import Awaitable, Callable, Collection
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
from bench.chaos.models import LanguageModels, tiny_pair
from bench.harness.command import run_benchmark
from testing.lab import Models, TableModels
from testing.trial import Trial

Row = Callable[[Trial], Awaitable[None]]

ROWS: dict[int, Row] = {
    1: processes.kill_target,
    2: processes.kill_only_target,
    3: processes.kill_draft,
    4: processes.kill_orchestrator,
    5: processes.freeze_target,
    6: network.partition_target,
    7: far_drafts.distant_draft,
    8: network.slow_target,
    9: far_drafts.unstable_draft,
    10: network.reset_connections,
    11: drafts.hostile_draft_service,
    12: protocol.protocol_abuse,
    13: drafts.other_models,
    14: clients.cancel_requests,
    15: clients.kill_client,
    16: clients.slow_readers,
    17: overload.overload,
    18: overload.too_few_slots,
    19: casualties.poison_request,
    20: protocol.hostile_contents,
    21: restarts.rolling_restart,
    22: endurance.many_requests,
    23: surroundings.failing_surroundings,
    24: security.wrong_certificates,
    26: starts.start_in_any_order,
    27: casualties.moved_sequences,
    28: overload.long_prefill,
    29: scaling.scale_targets,
    30: http_streams.http_streams,
    32: ingress.large_requests,
}

ANY_MODEL = frozenset({1, 3, 5, 14, 18, 21})
"""The rows that do not need the times and the planted faults of table models."""


def name_of(number: int) -> str:
    return ROWS[number].__name__.replace("_", "-")


NUMBERS = {name_of(number): number for number in ROWS} | {str(number): number for number in ROWS}
"""Of the rows, by name and by the number as it is written."""


class Engine(StrEnum):
    table = "table"
    torch = "torch"
    vllm = "vllm"


def description(row: Row) -> str:
    """The first paragraph of its docstring."""
    return " ".join((inspect.getdoc(row) or "").split("\n\n")[0].split())


async def run(number: int, seed: int, short: bool, models: Models | None = None) -> Trial:
    """Run one row with one seed. An unexpected exception fails the row."""
    trial = Trial(seed, short, models)
    try:
        await ROWS[number](trial)
    except Exception as error:
        text = "".join(str(error).split("\n")[:6])
        trial.failures.append(f"{type(error).__name__}: {text}"[:500])
    return trial


def main(
    rows: Annotated[
        list[str] | None,
        typer.Argument(help=f"rows by name or number (default: all): {', '.join(map(name_of, ROWS))}"),
    ] = None,
    seed: Annotated[int, typer.Option(help="seed of the prompts and of the times of the faults")] = 1,
    seeds: Annotated[int, typer.Option(help="runs of each row, with seed, seed + 1, ...")] = 1,
    short: Annotated[bool, typer.Option("--short", help="a few seconds per row: fewer requests")] = False,
    engine: Annotated[Engine, typer.Option(help="table models, or tiny language models on an engine")] = Engine.table,
    json_file: Annotated[str | None, typer.Option("--json", help="file to write the outcomes to")] = None,
) -> None:
    """Break a deployment on purpose, row by row of the fault table. The exit status is 1 if a criterion is missed."""
    console = Console()
    possible = ROWS.keys() if engine is Engine.table else ANY_MODEL
    numbers = _numbers(rows, possible, engine)
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
        for number, seed_of_run in itertools.product(numbers, range(seed, seed + seeds)):
            name, started = name_of(number), time.monotonic()
            with console.status(f"row {number} {name}, seed {seed_of_run} ..."):
                trial = asyncio.run(run(number, seed_of_run, short, models))
            took_s = time.monotonic() - started
            verdict = "[green]pass[/]" if trial.passed else "[red]FAIL[/]"
            console.print(f"row {number:>2} {name} seed {seed_of_run} {verdict} {took_s:5.1f} s", highlight=False)
            failures = [*trial.failures, *trial.slow]
            for failure in failures:
                console.print(f"    {failure}", highlight=False, markup=False)
            observed = "\n".join([*trial.seen, *(f"FAILED: {failure}" for failure in failures)])
            fault = f"[bold]{name}[/]\n{description(ROWS[number])}"
            table.add_row(f"{number}\nseed {seed_of_run}", fault, observed.replace("[", r"\["), verdict)
            outcomes.append(
                {"row": number, "name": name, "seed": seed_of_run, "passed": trial.passed}
                | {"seconds": round(took_s, 1), "seen": trial.seen, "failures": failures, "figures": trial.figures}
            )
            if json_file:  # after each row, so that an interrupted run keeps its outcomes
                with open(json_file, "w") as file:
                    json.dump(outcomes, file, indent=1)
    console.print(table)
    failed = sum(not outcome["passed"] for outcome in outcomes)
    console.print(f"{len(outcomes) - failed} passed, {failed} failed", highlight=False)
    raise typer.Exit(1 if failed else 0)


def _numbers(rows: list[str] | None, possible: Collection[int], engine: Engine) -> list[int]:
    """Of the rows to run. Raises BadParameter for those that there are not, or not with this engine."""
    if unknown := [row for row in rows or () if row not in NUMBERS]:
        raise typer.BadParameter(f"no row {unknown[0]}; there are {', '.join(NUMBERS)}")
    numbers = sorted({NUMBERS[row] for row in rows} if rows else possible)
    if others := [number for number in numbers if number not in possible]:
        shown = ", ".join(name_of(number) for number in sorted(possible))
        raise typer.BadParameter(f"row {name_of(others[0])} needs table models; with engine {engine} there are {shown}")
    return numbers


if __name__ == "__main__":
    run_benchmark(main, "specdec chaos")
