"""The demo: a model answers, first with speculation and then alone; texts are compared token by token, speeds shown.

The real one is a small chat model with its head, then with a draft service. The pair in the repository, which needs no
network, was trained on Python source and continues a file.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from specdec.cli.display import MarkedText
from specdec.cli.fetch import FetchError, SmolLm2, make
from specdec.cli.processes import deployment
from specdec.client import Client, Sample

MODELS = Path(__file__).resolve().parents[2] / "models" / "demo"
PROMPT = '''\
class Stack:
    """A simple stack.

    >>> s = Stack()
    """

    def __init__(self, items=()):
        self.items ='''

QUESTIONS = ("Why is the sky blue?", "Write a short poem about the sea.", "How do I make a good cup of tea?")


@dataclass(frozen=True, slots=True)
class Scene:
    """Models, and what they are asked. The first prompt's answer is shown."""

    target: Path
    draft: Path
    prompts: Sequence[dict[str, Any]]
    shown: str
    head: Path | None = None
    num_draft_tokens: int | None = None  # None: as many as pay

    @staticmethod
    def bundled(num_draft_tokens: int | None = None) -> Scene:
        number = 4 if num_draft_tokens is None else num_draft_tokens
        return Scene(MODELS / "target", MODELS / "draft", [{"text": PROMPT}], PROMPT, num_draft_tokens=number)

    @staticmethod
    def real(fetched: SmolLm2, questions: Sequence[str] = QUESTIONS, num_draft_tokens: int | None = None) -> Scene:
        prompts = [{"chat": {"messages": [{"role": "user", "content": each}]}} for each in questions]
        shown = f"> {questions[0]}\n"
        return Scene(fetched.target, fetched.draft, prompts, shown, fetched.head, num_draft_tokens)


@dataclass(frozen=True, slots=True)
class _Run:
    """The samples of all prompts in one mode, and the tokens per second after the first token of each."""

    name: str
    samples: list[Sample]
    rates: list[float]

    @property
    def rate(self) -> float:
        return statistics.median(self.rates)

    def sum(self, name: str) -> int:
        """Of a field of the statistics."""
        return sum(getattr(sample.finish.speculation, name) for sample in self.samples)


def scene(console: Console, questions: Sequence[str] | None, num_draft_tokens: int | None) -> Scene:
    """The real one, fetched if it is not there, else the bundled one."""
    try:
        fetched = make(console.print)
    except FetchError as error:
        console.print(f"{error}\nThis is the demo of the pair in the repository.", markup=False, highlight=False)
        return Scene.bundled(num_draft_tokens)
    return Scene.real(fetched, questions or QUESTIONS, num_draft_tokens)


async def run(console: Console, scene: Scene, max_tokens: int, temperature: float, seed: int) -> bool:
    """Run the demo. Returns whether all outputs are token-identical. Raises StartError or SpecdecError."""
    request: dict[str, Any] = {"temperature": temperature, "seed": seed, "max_tokens": max_tokens}
    how = "greedy" if temperature == 0 else f"temperature {temperature}, seed {seed}"
    by_draft = "with the draft service"
    if scene.head is None:
        runs = await _served(console, scene, request, how, [by_draft, "target alone"], scene.draft)
    else:
        runs = await _served(console, scene, request, how, ["with its head", "target alone"], None, scene.head)
        runs += await _served(console, scene, request, how, [by_draft], scene.draft)
    alone = next(each for each in runs if each.name == "target alone")
    identical = all(_ids(each) == _ids(alone) for each in runs)
    _report(console, runs, alone, identical)
    return identical


def _ids(run: _Run) -> list[list[int]]:
    return [sample.token_ids for sample in run.samples]


async def _served(
    console: Console,
    scene: Scene,
    request: dict[str, Any],
    how: str,
    modes: Sequence[str],
    draft: Path | None,
    head: Path | None = None,
) -> list[_Run]:
    """Serve the models, and ask for all prompts in each mode."""
    threads = 1 if scene.head is None else max(1, (os.cpu_count() or 1) // 2)  # the same in all modes
    async with AsyncExitStack() as stack:
        with console.status("Starting the services, each as a process ..."):
            services = await stack.enter_async_context(
                deployment(
                    str(scene.target),
                    str(draft) if draft else None,
                    arguments=[f"--threads={threads}"],
                    tell=lambda line: console.print(line, soft_wrap=True, markup=False, highlight=False),
                    head=str(head) if head else None,
                )
            )
        for service in services:
            console.print(f"  {service.name:<15} {service.address}  healthy", highlight=False)
        client = await stack.enter_async_context(Client(services[-1].address))
        # A warm-up of all modes.
        for warm_up in (scene.num_draft_tokens or 4, 0):
            await client.generate(**scene.prompts[0], **{**request, "max_tokens": 8}, num_draft_tokens=warm_up)
        number = scene.num_draft_tokens
        drafts = "as many draft tokens as pay" if number is None else f"{number} draft tokens per round"
        console.print(f"  {request['max_tokens']} tokens, {how}, {drafts}", highlight=False)
        runs = []
        for mode in modes:
            console.rule(mode)
            fixed = 0 if mode == "target alone" else number
            fields = request if fixed is None else {**request, "num_draft_tokens": fixed}
            samples, rates = [], []
            for place, prompt in enumerate(scene.prompts):
                shows = not place and (scene.head is None or head is not None)
                with console.status("" if shows else f"Asking for {len(scene.prompts)} answers ..."):
                    sample, rate = await _stream(console if shows else None, client, scene.shown, prompt | fields)
                samples.append(sample)
                rates.append(rate)
            runs.append(_Run(mode, samples, rates))
    return runs


async def _stream(console: Console | None, client: Client, shown: str, request: dict[str, Any]) -> tuple[Sample, float]:
    """One answer, printed as it comes if there is a console, and its tokens per second (0: too short)."""
    sample, marked = Sample(), MarkedText(console) if console else None
    if console:
        console.print(shown, end="", style="dim", highlight=False, markup=False)
    first = last = 0.0
    num_first = 0
    async for response in client.stream(**request):
        if not response.HasField("chunk"):
            continue
        sample.add(response.chunk)
        last = time.perf_counter()
        if not first:
            first, num_first = last, len(sample.token_ids)
        if marked:
            marked.show(sample)
    if marked:
        marked.end()
    return sample, (len(sample.token_ids) - num_first) / max(last - first, 1e-9)


def _report(console: Console, runs: Sequence[_Run], alone: _Run, identical: bool) -> None:
    console.rule()
    console.print(MarkedText(console).legend)
    table = Table(show_header=True, header_style="bold", box=None)
    for column in ("", "tokens/s", "speed", "passes", "tokens per pass", "accepted"):
        table.add_column(column, justify="left" if not column else "right")
    for each in runs:
        passes, drafted = each.sum("num_rounds"), each.sum("num_draft_tokens")
        num_tokens = sum(len(sample.token_ids) for sample in each.samples)
        # A text with only one chunk has no measurable speed.
        measured = each.rate and alone.rate
        table.add_row(
            each.name,
            f"{each.rate:.1f}",
            f"{each.rate / alone.rate:.2f} x" if measured else "too short",
            str(passes),
            f"{num_tokens / max(1, passes):.2f}",
            f"{each.sum('num_accepted_tokens') / drafted:.2f}" if drafted else "",
        )
    console.print(table)
    best = max(runs, key=lambda each: each.rate)
    if best is alone and alone.rate:
        console.print(
            f"A pass of this target ({1e3 / alone.rate:.0f} ms) takes less time than its drafts. By default the "
            "orchestrator drafts only where it pays.",
            highlight=False,
        )
    if identical:
        console.print("All outputs are token-identical.", style="bold")
    else:
        console.print("The outputs DIFFER.", style="bold red")
