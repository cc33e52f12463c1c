"""``specdec bench peers``: arguments, the sequence of measurements, and output of the results."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import tempfile
from contextlib import AsyncExitStack
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import transformers
import typer
from rich.console import Console

from bench.harness.command import Dtype, run_benchmark
from bench.models.damped_pair import Pair, damped_pair
from bench.peers import table
from bench.peers.comparison import Comparison, Plan, Section, compare
from bench.peers.prompts import PromptSource
from bench.peers.ratios import ratios
from bench.peers.services import running
from specdec.cli.demo import MODELS
from specdec.cli.processes import StartError


class PairName(StrEnum):
    damped = "damped"
    bundled = "bundled"


_LABELS = {
    PairName.damped: "damped pair: random weights, a model of costs and not of text",
    PairName.bundled: "bundled pair: small models of Python source, held-out text",
}
_VOCABULARIES = {PairName.damped: 8192, PairName.bundled: 4096}


def main(
    pair: Annotated[PairName, typer.Option(help="pair of checkpoints")] = PairName.damped,
    dtype: Annotated[Dtype, typer.Option(help="data type of all weights")] = Dtype.bfloat16,
    quick: Annotated[bool, typer.Option("--quick", help="one repetition of few tokens: about 3 minutes")] = False,
    only: Annotated[list[Section] | None, typer.Option(help="measure this section; may be repeated")] = None,
    streams: Annotated[list[int] | None, typer.Option(help="concurrent requests; may be repeated")] = None,
    threads: Annotated[
        list[int] | None,
        typer.Option(help="candidates for the threads of a model; may be repeated (default: 1 and 2; --quick: 2)"),
    ] = None,
    repeats: Annotated[
        int, typer.Option(help="runs of each contender (three texts each for one request); medians are shown")
    ] = 5,
    json_file: Annotated[str | None, typer.Option("--json", help="file to write the figures to")] = None,
    chart: Annotated[str | None, typer.Option(help="file for a chart (PNG; needs the extra bench)")] = None,
    cache: Annotated[str | None, typer.Option(help="directory that keeps the damped pair for later runs")] = None,
) -> None:
    """Compare our services with transformers on the same pair of models."""
    transformers.logging.set_verbosity(logging.ERROR)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    console = Console()
    plan = Plan.of(quick, repeats, only, streams, threads)
    console.print(f"{_LABELS[pair]}; {dtype}; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}", highlight=False)
    try:
        result = asyncio.run(_measure(console, pair, dtype, plan, cache))
    except StartError as error:
        console.print(str(error), markup=False)
        raise typer.Exit(1) from error
    if result.rows:
        console.print(table.contenders(result.rows))
        console.print(table.LEGEND, style="dim", highlight=False)
        if guessed := table.lookups_in_words(result.rows):
            console.print(guessed, style="dim", highlight=False)
    figures = ratios(result.rows)
    console.print_json(json.dumps(figures))
    if json_file:
        about = {"pair": pair.value, "label": _LABELS[pair], "dtype": dtype, "cores": os.cpu_count()}
        Path(json_file).write_text(json.dumps({**about, **result.as_dict(), "ratios": figures}, indent=1) + "\n")
    if chart:
        from bench.peers.chart import draw

        subtitle = f"{_LABELS[pair]}; {dtype}, {os.cpu_count()} cores"
        draw(result.rows, "specdec beside transformers: tokens per second, greedy", subtitle, Path(chart))


async def _measure(console: Console, name: PairName, dtype: str, plan: Plan, cache: str | None) -> Comparison:
    async with AsyncExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specdec-peers-")))
        with console.status("Making the pair ...") as status:

            def report(text: str) -> None:
                status.update(f"{text} ...")

            def show(text: str) -> None:
                console.print(f"  {text}", highlight=False)

            pair, prompts = _pair(name, Path(cache) if cache else directory)
            report("Starting the services")
            services = await stack.enter_async_context(running(pair, dtype, plan.threads))
            return await compare(pair, dtype, services, prompts, plan, report, show)


def _pair(name: PairName, directory: Path) -> tuple[Pair, PromptSource]:
    if name is PairName.bundled:
        return Pair(MODELS / "target", MODELS / "draft"), PromptSource.of_bundled(MODELS, _VOCABULARIES[name])
    return damped_pair(directory), PromptSource(_VOCABULARIES[name])


if __name__ == "__main__":
    run_benchmark(main)
