"""``specdec bench tasks``: tokens per pass and speed over the target alone, by method of drafting and by task.

A chat model answers questions of eight tasks, one at a time: each question with each method in turn, and without any.
Every method must give the same text. The questions of bench/tasks/questions.json are our own; --questions reads others,
a line of JSON each with "category" and "turns", of which the first is asked (Spec-Bench has this form).
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.harness.command import run_benchmark
from bench.harness.deployment import Processes
from specdec.cli.fetch import SmolLm2
from specdec.cli.processes import StartError
from specdec.client import Client

ALONE = "target alone"


class Method(NamedTuple):
    """How a method is served: what drafts beside the target, whether there is a draft, and the lookup's history."""

    beside: str = ""
    drafts: bool = False
    history: int = 0


METHODS = {
    "lookup": Method(),
    "history": Method(history=100_000),
    "draft": Method(drafts=True),
    "head": Method("head"),
    "head and draft": Method("head", drafts=True),
    "recycling": Method("recycling"),
    "lookahead": Method("lookahead"),
    "all": Method("head", drafts=True, history=100_000),
}
"""By name. Lookup is part of each."""

_OURS = Path(__file__).with_name("questions.json")


@dataclass(frozen=True, slots=True)
class Answered:
    """One question by one method."""

    task: str
    method: str
    seconds: float
    num_tokens: int
    num_rounds: int


def read_questions(file: Path | None, per_task: int) -> list[tuple[str, str]]:
    """(task, question), ``per_task`` of each at most. Raises ValueError if the file has another form."""
    if file is None:
        found: dict[str, list[str]] = json.loads(_OURS.read_text())
    else:
        found = {}
        try:
            for line in file.read_text().splitlines():
                question = json.loads(line)
                found.setdefault(question["category"], []).append(question["turns"][0])
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{file}: a line is not JSON with category and turns: {error}") from error
    return [(task, question) for task, questions in found.items() for question in questions[:per_task]]


async def measure(
    target: Path, draft: Path, head: Path, questions: list[tuple[str, str]], max_tokens: int, temperature: float,
    names: list[str], threads: int, done: Callable[[], None],
) -> list[Answered]:  # fmt: skip
    """Raises StartError, and ValueError if a text differs."""
    shared = [f"--threads={threads}", "--kv-slots=16384"]
    beside = {"": [], "head": [f"--head={head}"], "recycling": ["--self-draft=recycling"]}
    beside["lookahead"] = ["--self-draft=lookahead"]
    async with AsyncExitStack() as stack:
        made = await stack.enter_async_context(Processes())
        wanted = {"", *(METHODS[name].beside for name in names)}
        targets = {
            each: await made.model("target_service", f"--model={target}", *beside[each], *shared)
            for each in sorted(wanted)
        }
        if any(METHODS[name].drafts for name in names):
            small = await made.model("draft_service", f"--model={draft}", *shared)
        _, alone = await made.orchestrator(f"--target={targets[''].address}", f"--tokenizer={target}")
        methods: list[tuple[str, Client, dict[str, Any]]] = [(ALONE, alone, {"num_draft_tokens": 0})]
        for name in names:
            served = METHODS[name]
            flags = [f"--target={targets[served.beside].address}", f"--lookup-history={served.history}"]
            flags += [f"--draft={small.address}"] if served.drafts else []
            _, client = await made.orchestrator(*flags, f"--tokenizer={target}")
            methods.append((name, client, {}))
        found: list[Answered] = []
        for number, (task, question) in enumerate([("", "Say hello."), *questions]):
            texts = set()
            for method, client, fields in methods[number % 2 :] + methods[: number % 2]:
                answered, text = await _ask(client, task, method, question, max_tokens, temperature, fields)
                texts.add(text)
                if number:  # the first one warms up
                    found.append(answered)
            if len(texts) > 1:
                raise ValueError(f"the texts of a question differ: {question[:60]}")
            done()
        return found


async def _ask(
    client: Client, task: str, method: str, question: str, max_tokens: int, temperature: float, fields: dict[str, Any]
) -> tuple[Answered, str]:
    started = time.perf_counter()
    [sample] = await client.generate(
        chat={"messages": [{"role": "user", "content": question}]},
        max_tokens=max_tokens,
        temperature=temperature,
        seed=1,
        cache_salt=method,  # each reads the prompt itself, and learns from its own answers alone
        **fields,
    )
    seconds = time.perf_counter() - started
    return Answered(task, method, seconds, len(sample.token_ids), sample.finish.speculation.num_rounds), sample.text


def table_of(found: list[Answered]) -> tuple[Table, dict[str, dict[str, tuple[float, float]]]]:
    """Per task and method: tokens per pass, and the speed over the target alone (the median over the questions)."""
    figures: dict[str, dict[str, tuple[float, float]]] = {}
    methods = [each for each in dict.fromkeys(answer.method for answer in found) if each != ALONE]
    methods.sort(key=list(METHODS).index)
    table = Table(header_style="bold", box=None, padding=(0, 1, 0, 0))
    for name in ("task", *methods):
        table.add_column(name.replace(" ", "\n"))
    for task in dict.fromkeys(answer.task for answer in found):
        alone = [answer.seconds for answer in found if (answer.task, answer.method) == (task, ALONE)]
        for method in methods:
            those = [answer for answer in found if (answer.task, answer.method) == (task, method)]
            length = fmean(each.num_tokens / max(1, each.num_rounds) for each in those)
            speed = median(base / each.seconds for base, each in zip(alone, those, strict=True))
            figures.setdefault(task, {})[method] = length, speed
        table.add_row(
            task.replace("_", "\n"), *(f"{length:.2f}\n{speed:.2f}x" for length, speed in figures[task].values())
        )
    return table, figures


def main(
    questions: Annotated[Path | None, typer.Option(help="other questions, such as Spec-Bench's")] = None,
    per_task: Annotated[int, typer.Option(min=1, help="questions of each task at most")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="tokens of an answer at most")] = 64,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy")] = 0.0,
    methods: Annotated[str, typer.Option(help="some of the methods, separated by commas")] = ",".join(METHODS),
    threads: Annotated[int, typer.Option(min=1, help="of each model")] = 2,
    chart: Annotated[Path | None, typer.Option(help="file to draw the table into, such as tasks.png")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="file to write all answers' figures to")] = None,
) -> None:
    """Tokens per pass and speed over the target alone, by method of drafting and task, on SmolLM2-135M-Instruct."""
    names = methods.split(",")
    if unknown := [name for name in names if name not in METHODS]:
        raise typer.BadParameter(f"there is no method {unknown[0]}: {', '.join(METHODS)}")
    console = Console(highlight=False)
    fetched = SmolLm2.in_cache()
    if not fetched.target.is_dir():
        console.print(f"there is no {fetched.target}: specdec fetch smollm2 makes it", markup=False)
        raise typer.Exit(1)
    console.print(f"SmolLM2-135M-Instruct, {tokens} tokens, temperature {temperature:g}; {os.cpu_count()} cores")
    try:
        asked = read_questions(questions, per_task)
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task("Asking", total=1 + len(asked))
            work = measure(
                fetched.target, fetched.draft, fetched.head, asked, tokens, temperature, names, threads,
                lambda: progress.advance(bar),
            )  # fmt: skip
            found = asyncio.run(work)
    except (StartError, ValueError) as error:
        console.print(str(error), markup=False)
        raise typer.Exit(1) from error
    table, figures = table_of(found)
    console.print(table)
    console.print(
        "tokens per pass, and speed over the target alone (medians, by turns); all texts are equal", style="dim"
    )
    if chart:
        from bench.tasks.chart import draw

        draw(
            figures,
            f"SmolLM2-135M-Instruct, {tokens} tokens, temperature {temperature:g}; tokens per pass below",
            chart,
        )
    if json_file:
        result = {"answers": [asdict(each) for each in found], "figures": figures}
        json_file.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    run_benchmark(main)
