"""The demo: a model answers, first with speculation and then alone; texts are compared token by token, speeds shown.

The real one is a small chat model with its head, then with a draft service. The pair in the repository, which needs no
network, was trained on Python source and continues a file.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Mapping, Sequence
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

TEMPERATURES = (0.7, 0.0)
ALONE = "target alone"

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
        models = MODELS / "target", MODELS / "draft"
        return Scene(*models, prompts=[{"text": PROMPT}], shown=PROMPT, num_draft_tokens=number)

    @staticmethod
    def real(fetched: SmolLm2, questions: Sequence[str] = QUESTIONS, num_draft_tokens: int | None = None) -> Scene:
        return Scene(
            fetched.target,
            fetched.draft,
            prompts=[{"chat": {"messages": [{"role": "user", "content": question}]}} for question in questions],
            shown=f"> {questions[0]}\n",
            head=fetched.head,
            num_draft_tokens=num_draft_tokens,
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """The samples of all prompts in one mode, and the tokens per second after the first token of each."""

    name: str
    temperature: float
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


async def run(console: Console, scene: Scene, *, max_tokens: int, temperatures: Sequence[float], seed: int) -> bool:
    """Run the demo. Returns whether all outputs of a temperature are token-identical. Raises StartError or
    SpecdecError."""
    requests = [{"temperature": each, "seed": seed, "max_tokens": max_tokens} for each in temperatures]
    by_draft = "with the draft"
    if scene.head is None:
        runs = await _serve(console, scene, requests, modes=[by_draft, ALONE], draft=scene.draft)
    else:
        runs = await _serve(console, scene, requests, modes=["with its head", ALONE], head=scene.head)
        runs += await _serve(console, scene, requests, modes=[by_draft], draft=scene.draft)
    alone = {run.temperature: run for run in runs if run.name == ALONE}
    identical = all(_ids(run) == _ids(alone[run.temperature]) for run in runs)
    _report(console, runs, alone)
    if identical:
        console.print("All outputs are token-identical.", style="bold")
    else:
        console.print("The outputs DIFFER.", style="bold red")
    return identical


def _ids(run: _Run) -> list[list[int]]:
    return [sample.token_ids for sample in run.samples]


async def _serve(
    console: Console,
    scene: Scene,
    requests: Sequence[dict[str, Any]],
    *,
    modes: Sequence[str],
    draft: Path | None = None,
    head: Path | None = None,
) -> list[_Run]:
    """Serve the models, and ask for all prompts in each mode, with each request's temperature."""
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
            await client.generate(**scene.prompts[0], **{**requests[0], "max_tokens": 8}, num_draft_tokens=warm_up)
        runs = []
        for request, mode in itertools.product(requests, modes):
            console.rule(f"{mode}, {_sampling(request['temperature'])}")
            fixed = 0 if mode == ALONE else scene.num_draft_tokens
            fields = request if fixed is None else {**request, "num_draft_tokens": fixed}
            samples, rates = [], []
            for index, prompt in enumerate(scene.prompts):
                shows = not index and request is requests[0] and (scene.head is None or head is not None)
                with console.status("" if shows else f"Asking for {len(scene.prompts)} answers ..."):
                    shown = scene.shown if shows else None
                    sample, rate = await _stream(console, client, prompt | fields, shown=shown)
                samples.append(sample)
                rates.append(rate)
            runs.append(_Run(mode, request["temperature"], samples, rates))
    return runs


def _sampling(temperature: float) -> str:
    return f"T = {temperature:g}" if temperature else "greedy"


async def _stream(
    console: Console, client: Client, request: dict[str, Any], *, shown: str | None
) -> tuple[Sample, float]:
    """One answer, printed as it comes after ``shown`` unless that is None, and its tokens per second (0: too short)."""
    sample, marked = Sample(), None if shown is None else MarkedText(console)
    if shown is not None:
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


def _report(console: Console, runs: Sequence[_Run], alone_at: Mapping[float, _Run]) -> None:
    """``alone_at``: by temperature, the target alone."""
    console.rule()
    console.print(MarkedText(console).legend)
    table = Table(show_header=True, header_style="bold", box=None)
    for column in ("", "", "tokens/s", "speed", "passes", "tokens per pass", "accepted"):
        table.add_column(column, justify="left" if not column else "right")
    temperatures = list(alone_at)
    for run in sorted(runs, key=lambda run: temperatures.index(run.temperature)):
        alone = alone_at[run.temperature]
        passes, drafted = run.sum("num_rounds"), run.sum("num_draft_tokens")
        num_tokens = sum(len(sample.token_ids) for sample in run.samples)
        # A text with only one chunk has no measurable speed.
        speed = f"{run.rate / alone.rate:.2f} x" if run.rate and alone.rate else "too short"
        accepted = f"{run.sum('num_accepted_tokens') / drafted:.2f}" if drafted else ""
        cells = (
            run.name,
            _sampling(run.temperature),
            f"{run.rate:.1f}",
            speed,
            str(passes),
            f"{num_tokens / max(1, passes):.2f}",
            accepted,
        )
        table.add_row(*cells)
    console.print(table)
    best = max(runs, key=lambda run: run.rate / max(1e-9, alone_at[run.temperature].rate))
    if best.name == ALONE and best.rate:
        console.print(
            f"A pass of this target ({1e3 / best.rate:.0f} ms) takes less time than its drafts. By default the "
            "orchestrator drafts only where it pays.",
            highlight=False,
        )
