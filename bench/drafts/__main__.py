"""``specdec bench drafts``: what a smaller or larger draft of a target is worth.

    specdec bench drafts models/demo/draft OTHER... --chart drafts.png

Each prompt is continued with each draft in turn, with fixed numbers of draft tokens and with the chosen number, and by
the target alone. All texts must be equal. The drafts share this machine with their target; only one works at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.drafts.measuring import CHOSEN, NUMBERS, Figure, Figures, measure, num_parameters
from bench.harness.command import run_benchmark
from specdec.cli.processes import StartError

DEMO = Path(__file__).resolve().parents[2] / "models" / "demo"


def tables(sizes: Sequence[tuple[str, int]], found: Sequence[Figures]) -> list[Table]:
    """Tokens per round and speeds: a row for each draft, of this name and number of parameters."""
    made = []
    shown: tuple[tuple[str, Callable[[Figure], str]], ...] = (
        ("Tokens per round, by draft tokens", lambda each: f"{each.length:.2f}"),
        ("Speed over the target alone", lambda each: f"{each.speed:.2f} x"),
    )
    for title, show in shown:
        table = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
        table.add_column("draft", overflow="fold")
        for column in ("parameters", "first right", *map(_name, NUMBERS)):
            table.add_column(column, justify="right", no_wrap=True)
        for (name, size), figures in zip(sizes, found, strict=True):
            row = (show(figures[number]) for number in NUMBERS)
            table.add_row(name, f"{size / 1e6:.2f} M", f"{figures[1].acceptance:.2f}", *row)
        made.append(table)
    return made


def _name(number: int | None) -> str:
    return "chosen" if number is CHOSEN else str(number)


def main(
    drafts: Annotated[list[Path], typer.Argument(help="checkpoints with the target's vocabulary")],
    target: Annotated[Path, typer.Option(help="checkpoint")] = DEMO / "target",
    prompts: Annotated[Path, typer.Option(help='JSON: a list of {"text": ...}')] = DEMO / "prompts.json",
    tokens: Annotated[int, typer.Option(min=2, help="tokens of each text")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="of each model")] = 2,
    chart: Annotated[Path | None, typer.Option(help="file to draw the figures into, such as drafts.png")] = None,
) -> None:
    """Tokens per round and speed over the target alone, by draft and by the number of draft tokens (greedy)."""
    console = Console(highlight=False)
    try:
        sizes = [(draft.name, num_parameters(draft)) for draft in drafts]
        of_target = num_parameters(target)
        texts = [str(each["text"]) for each in json.loads(prompts.read_text())]
        console.print(f"target: {of_target / 1e6:.2f} M parameters; {os.cpu_count()} cores", markup=False)
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("Asking", total=1 + len(texts))
            found = asyncio.run(measure(target, drafts, texts, tokens, threads, lambda: progress.advance(bar)))
    except (StartError, ValueError) as error:
        console.print(str(error), markup=False)
        raise typer.Exit(1) from error
    for table in tables(sizes, found):
        console.print(table)
        console.print()
    told = "first right: the share of accepted tokens at one draft token; speeds are medians, all texts are equal"
    console.print(told, style="dim")
    if chart:
        from bench.drafts.chart import draw

        draw([size / of_target for _, size in sizes], found, chart)


if __name__ == "__main__":
    run_benchmark(main)
