"""``specdec bench drafts``: what a smaller or larger draft of a target is worth.

    specdec bench drafts models/demo/draft OTHER... --chart drafts.png

Each prompt is continued with each draft in turn, with fixed numbers of draft tokens and with the chosen number, and by
the target alone. All texts must be equal. The drafts share this machine with their target; only one works at a time.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.drafts.measuring import (
    CHOSEN,
    NUMBERS,
    Figure,
    Figures,
    by_parameters,
    measure,
    num_parameters,
    read_prompts,
)
from bench.harness.command import run_benchmark
from specdec.cli.demo import MODELS
from specdec.cli.processes import StartError


def tables(sizes: Sequence[tuple[str, int]], of_target: int, found: Sequence[Figures]) -> list[Table]:
    """Tokens per round and speeds: a row for each draft, of this name and number of parameters."""
    made = []
    shown: tuple[tuple[str, Callable[[Figure, int | None, float], str]], ...] = (
        ("Tokens per round, by draft tokens", lambda each, *_: f"{each.length:.2f}"),
        ("Speed over the target alone, here", lambda each, *_: f"{each.speed:.2f} x"),
        ("Speed where time grows with parameters", _by_parameters),
    )
    for title, show in shown:
        table = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 2, 0, 0))
        table.add_column("draft", overflow="fold")
        for column in ("parameters", "first right", *map(_name, NUMBERS)):
            table.add_column(column, justify="right", no_wrap=True)
        for (name, size), figures in zip(sizes, found, strict=True):
            row = (show(figures[number], number, size / of_target) for number in NUMBERS)
            table.add_row(name, f"{size / 1e6:.2f} M", f"{figures[1].acceptance:.2f}", *row)
        made.append(table)
    return made


def _by_parameters(figure: Figure, number: int | None, share: float) -> str:
    return "" if number is CHOSEN else f"{by_parameters(figure, number, share):.2f} x"


def _name(number: int | None) -> str:
    return "chosen" if number is CHOSEN else str(number)


def main(
    drafts: Annotated[list[Path], typer.Argument(help="checkpoints with the target's vocabulary")],
    target: Annotated[Path, typer.Option(help="checkpoint")] = MODELS / "target",
    prompts: Annotated[Path, typer.Option(help='JSON: a list of {"text": ...}')] = MODELS / "prompts.json",
    tokens: Annotated[int, typer.Option(min=2, help="tokens of each text")] = 64,
    threads: Annotated[int, typer.Option(min=1, help="of each model")] = 2,
    chart: Annotated[Path | None, typer.Option(help="file to draw the figures into, such as drafts.png")] = None,
) -> None:
    """Tokens per round and speed over the target alone, by draft and by the number of draft tokens (greedy)."""
    console = Console(highlight=False)
    try:
        sizes = [(draft.name, num_parameters(draft)) for draft in drafts]
        of_target = num_parameters(target)
        texts = read_prompts(prompts)
        console.print(f"target: {of_target / 1e6:.2f} M parameters; {os.cpu_count()} cores", markup=False)
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("Asking", total=1 + len(texts))
            found = asyncio.run(measure(target, drafts, texts, tokens, threads, lambda: progress.advance(bar)))
    except (StartError, ValueError) as error:
        console.print(str(error), markup=False)
        raise typer.Exit(1) from error
    for table in tables(sizes, of_target, found):
        console.print(table)
        console.print()
    told = "first right: the share of accepted tokens at one draft token; the chosen number has prompt lookup beside it"
    console.print(f"{told}; speeds are medians; all texts are equal", style="dim")
    if chart:
        from bench.drafts.chart import draw

        draw([size / of_target for _, size in sizes], found, chart)


if __name__ == "__main__":
    run_benchmark(main)
