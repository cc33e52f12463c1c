"""``specdec bench engines``: arguments, the sequence of measurements, and output of the results."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import transformers
import typer
from rich.console import Console

from bench.engines import generators, pairs, parity, services, table
from bench.engines.pairs import PairName
from bench.engines.turns import Contender, Row, take_turns
from bench.harness.command import run_benchmark
from bench.models.damped_pair import Pair
from bench.peers.contender import ADAPTIVE
from bench.peers.prompts import PromptSource
from specdec.cli.processes import StartError
from specdec.runner.checkpoint import Checkpoint

_PROMPT_TOKENS = 64
_STREAMS = (1, 4, 16)
_QUICK_STREAMS = (1, 4)
_QUICK_TOKENS = 16
_QUICK_PROMPTS = 4


def main(
    pair: Annotated[PairName, typer.Option(help="pair of checkpoints")] = PairName.smollm2,
    compare_texts: Annotated[
        bool, typer.Option("--parity", help="compare texts of engine vllm with engine torch and transformers")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="one turn of few tokens; --parity: 4 prompts")] = False,
    streams: Annotated[list[int] | None, typer.Option(help="concurrent requests; may be repeated")] = None,
    tokens: Annotated[int, typer.Option(help="tokens per request")] = 48,
    num_draft_tokens: Annotated[int, typer.Option(help="draft tokens per round, unless adaptive")] = 4,
    prompts: Annotated[int, typer.Option(help="prompts of --parity, each greedy and drawn")] = 40,
    repeats: Annotated[int, typer.Option(help="turns; medians are shown")] = 3,
    threads: Annotated[int, typer.Option(help="CPU threads of each model")] = 1,
    json_file: Annotated[str | None, typer.Option("--json", help="file to write the figures to")] = None,
    cache: Annotated[str | None, typer.Option(help="directory that keeps the damped pair for later runs")] = None,
) -> None:
    """Compare vLLM's own generate with our services on the engines torch and vllm: float32, without compilation."""
    if not find_spec("vllm"):
        print("specdec: bench engines needs vLLM in the environment that it runs in (make setup-vllm)", file=sys.stderr)
        raise typer.Exit(2)
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if quick:
        tokens, repeats, prompts = min(tokens, _QUICK_TOKENS), 1, min(prompts, _QUICK_PROMPTS)
    console = Console(highlight=False)
    console.print(f"{pairs.LABELS[pair]}; float32; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    with tempfile.TemporaryDirectory(prefix="specdec-engines-") as directory, console.status("Starting") as status:

        def report(text: str) -> None:
            status.update(text) if console.is_terminal else console.print(f"  {text}")

        try:
            found, source = pairs.find(pair, Path(cache or directory))
            if compare_texts:
                of_texts = parity.measure(found, source.take(prompts, _PROMPT_TOKENS), tokens, threads, report)
                _show_texts(console, asyncio.run(of_texts), json_file)
                return
            wanted = streams or (_QUICK_STREAMS if quick else _STREAMS)
            measure = _measure(found, source, wanted, tokens, num_draft_tokens, repeats, threads, report)
            rows = asyncio.run(_shown(console, measure))
        except (FileNotFoundError, StartError) as error:
            console.print(str(error), markup=False)
            raise typer.Exit(1) from error
    figures = table.ratios(rows)
    console.print(table.LEGEND, style="dim")
    console.print_json(json.dumps(figures))
    if json_file:
        result = {"pair": pair.value, "rows": [asdict(row) for row in rows], "ratios": figures}
        Path(json_file).write_text(json.dumps(result, indent=1) + "\n")


def _show_texts(console: Console, found: parity.Parity, json_file: str | None) -> None:
    for each in found.divergences:
        console.print(f"  {each}")
    console.print(str(found))
    if json_file:
        Path(json_file).write_text(json.dumps(asdict(found) | {"holds": found.holds}, indent=1) + "\n")
    if not found.holds:
        raise typer.Exit(1)


async def _shown(console: Console, blocks: AsyncIterator[list[Row]]) -> list[Row]:
    """All rows; each block is printed when it comes."""
    rows: list[Row] = []
    async for block in blocks:
        console.print(table.speeds(block))
        rows += block
    return rows


async def _measure(
    pair: Pair,
    source: PromptSource,
    streams: list[int] | tuple[int, ...],
    tokens: int,
    num_draft_tokens: int,
    repeats: int,
    threads: int,
    report: Callable[[str], None],
) -> AsyncIterator[list[Row]]:
    """For each number of requests at a time."""
    ends = Checkpoint.find(str(pair.target), "float32").info.eos_token_ids
    contenders: dict[str, Contender] = {}
    async with AsyncExitStack() as stack:
        for how in generators.HOW:
            report(f"starting vLLM {how}")
            made = generators.running(pair, how, threads, num_draft_tokens, ends)
            contenders[f"vLLM {how}"] = (await stack.enter_async_context(made)).run
        for engine in services.ENGINES:
            report(f"starting the services on {engine}")
            run = (await stack.enter_async_context(services.running(pair, engine, threads))).run
            for name, count in (("alone", 0), ("draft", num_draft_tokens), ("adaptive", ADAPTIVE)):
                contenders[f"{engine} services, {name}"] = partial(run, num_draft_tokens=count)
        for count in streams:
            yield await take_turns(
                contenders,
                source,
                streams=count,
                prompt_tokens=_PROMPT_TOKENS,
                max_tokens=tokens,
                repeats=repeats,
                report=report,
            )


if __name__ == "__main__":
    run_benchmark(main)
