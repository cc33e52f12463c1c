"""Runs a comparison in sight of a user: progress, tables that fit 80 columns, JSON, a chart, and an exit status."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from bench.harness.command import Common
from bench.harness.runner import Case, Contender, Results, Row, measure
from specdec.cli.processes import StartError
from specdec.core.errors import SpecdecError

Say = Callable[[str], None]
Prepare = Callable[[Path, Say], AbstractAsyncContextManager[Sequence[Case]]]
"""Starts what is compared. It may write into the directory, which is temporary, and say what the user should know."""
Values = Mapping[str, Mapping[str, float]]
"""By contender and case."""
Columns = Mapping[str, Callable[[Row], str]]


@dataclass(frozen=True, slots=True)
class Heat:
    """A chart: a cell for each contender (row) and case (column), coloured by its speed, with a note below."""

    title: str
    speeds: Values
    notes: Mapping[str, Mapping[str, str]]


@dataclass(frozen=True, slots=True)
class Panel:
    """Lines by their names, each of points (x, y)."""

    title: str
    across: str
    lines: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Lines:
    """A chart of panels beside each other."""

    title: str
    panels: Sequence[Panel]
    logarithmic: bool = False


def compare(prepare: Prepare, max_tokens: int) -> Results:
    """All results. What cannot be started or asked ends the command, with a message and status 1."""
    console = Console(highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="specdec-bench-") as directory,
        Progress(*columns, console=console, transient=True) as progress,
    ):
        bar = progress.add_task("Starting", total=None)

        def say(line: str) -> None:
            progress.console.print(line, markup=False)

        def report(case: Case, contender: Contender) -> None:
            progress.update(bar, advance=1, description=f"{case.name}: {contender.name}"[:45])

        async def work() -> Results:
            async with prepare(Path(directory), say) as cases:
                progress.update(bar, total=sum(case.num_runs for case in cases), description="Asking")
                return await measure(cases, max_tokens, report)

        try:
            return asyncio.run(work())
        except (StartError, SpecdecError, ValueError) as error:
            say(str(error))
            raise typer.Exit(1) from error


def conditions(label: str, max_tokens: int) -> str:
    """The line above all figures."""
    return f"{label}; {max_tokens} tokens; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def finish(
    common: Common, results: Results, tables: Mapping[str, Table], chart: Heat | Lines, legend: str = "", **figures: Any
) -> None:
    """Show the tables by their titles, a legend and whether texts are equal, and write the files of the flags.

    ``figures`` are for the JSON file. Raises typer.Exit with status 1 if a text is not as it must be.
    """
    console = Console(highlight=False)
    for title, table in tables.items():
        console.print(title, style="italic")
        console.print(table, "")
    if legend:
        console.print(legend, style="dim")
    if common.json:
        whole = {"rows": [as_json(row) for row in results.rows], "differing": results.differing, **figures}
        common.json.write_text(json.dumps(whole, indent=1) + "\n")
    if common.chart:
        from bench.harness.chart import draw

        draw(chart, common.chart)
    if results.differing:
        console.print(f"{len(results.differing)} of {results.num_compared} texts DIFFER:", style="bold red")
        for line in results.differing[:10]:
            console.print(f"  {line}", markup=False)
        raise typer.Exit(1)
    console.print(
        f"All {results.num_compared} compared texts are equal." if results.num_compared else "No text was compared."
    )


def conclude(console: Console, json_file: Path | None, figures: Any, *, num_wrong: int) -> None:
    """The end of a benchmark of table models, which know their texts: write the figures, and say whether texts are
    theirs. Raises typer.Exit with status 1 if one is not."""
    if json_file:
        json_file.write_text(json.dumps(figures, indent=1) + "\n")
    if num_wrong:
        console.print(f"{num_wrong} texts DIFFER", style="bold red")
        raise typer.Exit(1)
    console.print("All texts are equal to the target's.")


def as_json(row: Row) -> dict[str, Any]:
    runs = [
        {"seconds": run.seconds, "tokens": run.num_tokens, "rounds": run.num_rounds, "used_s": dict(run.used_s)}
        for run in row.runs
    ]
    return {
        "case": row.case,
        "contender": row.contender,
        "tokens_per_s": row.tokens_per_s,
        "over_first": row.over_first,
        "tokens_per_pass": row.tokens_per_pass,
        "acceptance": row.acceptance,
        "same_as_first": row.num_same,
        "runs": runs,
    }


def values(results: Results, figure: Callable[[Row], float], but: str = "") -> dict[str, dict[str, float]]:
    """A figure of all rows, without those of the contender ``but``."""
    by_contender: dict[str, dict[str, float]] = {}
    for row in results.rows:
        if row.contender != but:
            by_contender.setdefault(row.contender, {})[row.case] = figure(row)
    return by_contender


def matrix(figures: Values, floor: float = 0.0) -> Table:
    """A row for each contender and a column for each case, its best in bold; with a ``floor`` what is below it, in red.
    Figures may be missing."""
    cases = list(dict.fromkeys(case for of_contender in figures.values() for case in of_contender))
    table = _table()
    for case in cases:
        table.add_column(case.replace("_", " "), overflow="fold", min_width=4, justify="right", vertical="bottom")
    best = {case: max(figure[case] for figure in figures.values() if case in figure) for case in cases}
    for contender, of_contender in figures.items():
        styles = (_style(of_contender.get(case), best[case], floor) for case in cases)
        shown = (_figure(of_contender.get(case)) for case in cases)
        table.add_row(contender, *(style + figure for style, figure in zip(styles, shown, strict=True)))
    return table


def _style(value: float | None, best: float, floor: float) -> str:
    if floor and value is not None:
        return "[red]" if value < floor else ""
    return "[bold]" if value == best else ""


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}" if value < 100 else f"{value:.0f}"


def by_case(results: Results, columns: Columns) -> Table:
    """A block for each case, and a line for each contender, the fastest one in bold. A column without any cell is left
    out."""
    shown = {name: show for name, show in columns.items() if any(map(show, results.rows))}
    table = _table()
    for name in shown:
        table.add_column(name, justify="right", no_wrap=True)
    for case in results.cases:
        rows = results.of(case)
        fastest = max(row.tokens_per_s for row in rows)
        if case:
            table.add_row(case, style="italic")
        for row in rows:
            style = "bold" if row.tokens_per_s == fastest else ""
            table.add_row(f"  {row.contender}", *(show(row) for show in shown.values()), style=style)
    return table


def _drafted(row: Row) -> str:
    number = row.per_round("num_draft_tokens") - row.per_round("num_lookup_tokens")
    return f"{number:.1f}" if number else ""


USUAL_COLUMNS: Columns = {
    "tokens/s": lambda row: f"{row.tokens_per_s:.1f}",
    "over first": lambda row: f"{row.over_first:.2f} x",
    "per pass": lambda row: f"{row.tokens_per_pass:.2f}" if row.tokens_per_pass else "",
    "drafted": _drafted,
    "accepted": lambda row: f"{row.acceptance:.2f}" if row.acceptance else "",
    "same": lambda row: f"{row.num_same}/{row.num_texts}",
}
"""Speed, speed over the first contender, tokens per pass, and the draft tokens of a round with their acceptance."""

USUAL_LEGEND = (
    "over first: median over the turns of the speed over the first line's; per pass: tokens of a pass of the target;"
    " drafted: draft tokens a round, without prompt lookup, and their accepted share; same: texts as the first line's"
)


def heat_of(title: str, results: Results, but: str = "") -> Heat:
    """The speed over the first contender, and tokens per pass (where they are reported) or per second."""

    def note(row: Row) -> str:
        return f"{row.tokens_per_pass:.2f} a pass" if row.tokens_per_pass else f"{row.tokens_per_s:.1f} tokens/s"

    speeds = values(results, lambda row: row.over_first, but)
    notes = {name: {case: note(results.row(case, name)) for case in cases} for name, cases in speeds.items()}
    return Heat(title, speeds, notes)


def _table() -> Table:
    table = Table(header_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column(vertical="bottom", no_wrap=True)
    return table
