"""``specdec bench tasks``: tokens per pass and speed over the target alone, by method of drafting and by task.

A chat model answers questions of eight tasks, one at a time: each question with each method in turn, and without any.
Every method must give the same text. The questions of bench/tasks/questions.json are our own; --questions reads others,
a line of JSON each with "category" and "turns" (Spec-Bench has this form). A later turn follows in the same chat.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from bench.harness.command import run_benchmark
from bench.tasks.asking import Answered, ask
from bench.tasks.methods import METHODS, chosen
from bench.tasks.questions import read_questions
from bench.tasks.serving import served
from bench.tasks.table import figures_of, tables
from specdec.cli.fetch import SmolLm2
from specdec.cli.processes import StartError


def main(
    questions: Annotated[Path | None, typer.Option(help="other questions, such as Spec-Bench's")] = None,
    per_task: Annotated[int, typer.Option(min=1, help="questions of each task at most")] = 8,
    turns: Annotated[int | None, typer.Option(min=1, help="turns of a question at most; default: all")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="tokens of an answer at most")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0.0,
    methods: Annotated[str, typer.Option(help="some of the methods, separated by commas")] = ",".join(METHODS),
    ngram: Annotated[
        Path | None, typer.Option(help="file of specdec ngram build; default: counted in Python's help() texts")
    ] = None,
    threads: Annotated[int, typer.Option(min=1, help="of each model")] = 2,
    chart: Annotated[Path | None, typer.Option(help="file to draw the table into, such as tasks.svg")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="file to write all answers' figures to")] = None,
) -> None:
    """Tokens per pass and speed over the target alone, by method of drafting and task, on SmolLM2-135M-Instruct.

    Medusa and ReDrafter heads are asked if `specdec train head` has written them to models/smollm2/medusa and
    redrafter.
    """
    console, models = Console(highlight=False), SmolLm2.in_cache()
    try:
        names, missing = chosen(methods.split(","), models.head.parent)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    for name in missing:
        console.print(f"{name} is left out: its head is not in {models.head.parent}", markup=False, style="dim")
    if not models.is_there:
        console.print(f"there is no {models.target}: specdec fetch smollm2 makes it", markup=False)
        raise typer.Exit(1)
    title = f"SmolLM2-135M-Instruct, {tokens} tokens, temperature {temperature:g}"
    console.print(f"{title}; {os.cpu_count()} cores")
    try:
        asked = read_questions(questions, per_task, turns)
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("Asking", total=1 + len(asked))

            async def work() -> list[Answered]:
                async with served(models, names, threads, ngram) as found:
                    clients = {name: client for name, (_, client) in found.items()}
                    return await ask(clients, asked, tokens, temperature, lambda: progress.advance(bar))

            found = asyncio.run(work())
    except (StartError, ValueError) as error:
        console.print(str(error), markup=False)
        raise typer.Exit(1) from error
    figures = figures_of(found)
    for table in tables(figures):
        console.print(table)
        console.print()
    console.print("medians and means are over turns; all texts are equal", style="dim")
    if chart:
        from bench.tasks.chart import draw

        draw(figures, f"{title}; tokens per pass below", chart)
    if json_file:
        result = {"answers": [asdict(each) for each in found], "figures": figures}
        json_file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_benchmark(main)
