"""``specdec bench distance``: arguments, the sequence of measurements, and output of the results."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import transformers
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.distance import table
from bench.distance.formula import Prediction, predictions
from bench.distance.lab import lab
from bench.distance.modes import AHEAD, ALONE, Mode
from bench.distance.pairs import Pair, PairName, TableCosts, make
from bench.distance.ratios import over_adaptive, pair_of_ratios, ratios
from bench.distance.row import Row
from bench.distance.situations import TEMPERATURES, Situation, groups, measure, num_runs, situations
from bench.harness.command import Dtype, run_benchmark
from specdec.cli.processes import StartError

_COSTS = TableCosts()

_QUICK_TOKENS, _QUICK_TOKENS_PER_S, _MIN_QUICK_TOKENS = 80, 24.0, 24
"""A quick run has 80 tokens if the target alone reaches 24 tokens/s, in proportion fewer on a slower machine, and at
least 24."""
_SPEED_PROBE_TOKENS = 16
_REPORT_EVERY_RUNS = 30
"""Runs between progress lines in a file or a pipe; a terminal shows a progress bar."""


def main(
    pair: Annotated[
        PairName, typer.Option(help="table: passes that sleep; damped, bundled: real models; all: every pair in turn")
    ] = PairName.table,
    pass_ms: Annotated[float, typer.Option(help="time of a pass of the table target")] = _COSTS.pass_ms,
    step_ms: Annotated[float, typer.Option(help="time of a draft step, for any number of nodes")] = _COSTS.step_ms,
    acceptance: Annotated[float, typer.Option(help="acceptance rate of the table pair")] = _COSTS.acceptance,
    runner_up: Annotated[
        float, typer.Option(help="table pair: how often the second candidate is right when the first is wrong")
    ] = _COSTS.runner_up,
    row_us: Annotated[float, typer.Option(help="time of each row of a pass of the table target")] = _COSTS.row_us,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="weights of the other pairs; float32 takes longer (default: the CPU's dtype)"),
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0, help="sampling temperature; may be repeated (default: 0 and 1)")
    ] = None,
    num_ahead_tokens: Annotated[int, typer.Option(help="the orchestrator's setting in the mode ahead")] = 60,
    tokens: Annotated[int, typer.Option(help="tokens per run")] = 160,
    repeats: Annotated[int, typer.Option(help="runs of each mode, in turns; medians are shown")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="one short run of each mode: at most 4 minutes")] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="file to write the figures to")] = None,
    chart: Annotated[str | None, typer.Option(help="file for a chart (PNG; needs the extra bench)")] = None,
) -> None:
    """Compare the target alone, a synchronous draft and one that grows ahead, at several distances to the draft."""
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    console = Console()
    if quick:
        tokens, repeats = min(tokens, _QUICK_TOKENS), 1
    costs = TableCosts(pass_ms, step_ms, acceptance, runner_up, row_us)
    names = [each for each in PairName if each is not PairName.all] if pair is PairName.all else [pair]
    started = time.monotonic()
    rows: list[Row] = []
    labels: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="specdec-distance-") as directory:
        for name in names:
            made = make(name, Path(directory), costs, dtype or "auto")
            labels[name.value] = made.label
            console.print(f"{made.label}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", highlight=False)
            plan = situations(made, quick, temperature or TEMPERATURES)
            try:
                rows += asyncio.run(_measure(console, made, plan, num_ahead_tokens, tokens, repeats, quick))
            except StartError as error:
                console.print(str(error), markup=False)
                raise typer.Exit(1) from error
    console.print(f"Measured in {time.monotonic() - started:.0f} s.\n", highlight=False)
    predicted = predictions(rows)
    _show(console, rows, predicted)
    figures = ratios(rows)
    console.print(f"Ratios of the {pair_of_ratios(rows)} pair, unless the name has another pair:", highlight=False)
    console.print_json(json.dumps(figures))
    if beyond := over_adaptive(rows):
        console.print(f"Ahead over adaptive: {', '.join(f'{where} {ratio:g}' for where, ratio in beyond.items())}")
    if json_file:
        result = {
            "pair": pair.value,
            "labels": labels,
            "rows": [asdict(row) | {"tokens_per_s": row.tokens_per_s} for row in rows],
            "formula": [asdict(each) for each in predicted],
            "ratios_of": pair_of_ratios(rows),
            "ratios": figures,
            "ahead_over_adaptive": beyond,
        }
        Path(json_file).write_text(json.dumps(result, indent=1) + "\n")
    if chart:
        from bench.distance.chart import draw

        draw(rows, labels, Path(chart))


def _show(console: Console, rows: Sequence[Row], predicted: Sequence[Prediction]) -> None:
    for name, temperature, some in table.sections(rows):
        where = f"{name}, T = {temperature:g}"
        for shown in (
            table.speeds(some, f"Tokens per second: {where}"),
            table.times(some, f"Milliseconds of a round: {where}"),
            table.hits(some, f"Hit rate of growing ahead: {where}"),
        ):
            console.print(shown, "")
    console.print(table.LEGEND, style="dim", highlight=False)
    console.print("", table.formula(predicted))


async def _measure(
    console: Console,
    pair: Pair,
    plan: Sequence[Situation],
    num_ahead_tokens: int,
    tokens: int,
    repeats: int,
    quick: bool,
) -> list[Row]:
    rows: list[Row] = []
    columns = (
        TextColumn("{task.description:<36}"),
        BarColumn(24),
        MofNCompleteColumn(),
        TextColumn("runs"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("Starting the services", total=num_runs(plan, repeats))
        async with lab(pair, num_ahead_tokens) as running:
            first = await running.run(ALONE, 0.0, 1, _SPEED_PROBE_TOKENS, seed=0)
            if quick:
                rate = first.num_tokens / first.seconds
                tokens = max(_MIN_QUICK_TOKENS, min(tokens, int(_QUICK_TOKENS * rate / _QUICK_TOKENS_PER_S)))
            progress.update(task, description="Measuring")

            def done(situation: Situation, mode: Mode) -> None:
                progress.update(task, advance=1, description=f"{_where(situation)}: {mode.name}")
                [told] = progress.tasks
                if not console.is_terminal and told.completed % _REPORT_EVERY_RUNS == 0:
                    console.print(f"  {told.completed:.0f} of {told.total:.0f} runs", style="dim", highlight=False)

            for group in groups(plan):
                found = await measure(running, group, tokens, repeats, done)
                for situation, of_situation in zip(group, found, strict=True):
                    progress.console.print(f"  {_where(situation)}: {_in_short(of_situation)}", highlight=False)
                    rows += of_situation
    return rows


def _where(situation: Situation) -> str:
    return f"{situation.name}, T = {situation.temperature:g}"


def _in_short(rows: Sequence[Row]) -> str:
    rates = {row.mode: row.tokens_per_s for row in rows}
    waited = [rate for mode, rate in rates.items() if mode not in (ALONE.name, AHEAD.name)]
    best = f", best synchronous {max(waited):.1f}" if waited else ""
    return f"alone {rates[ALONE.name]:.1f}{best}, ahead {rates[AHEAD.name]:.1f} tokens/s"


if __name__ == "__main__":
    run_benchmark(main)
