"""``specdec bench engines``: vLLM by itself and our services on the engines torch and vllm, by turns, greedy.

Only what is compared with one another runs at the same time: each comparison starts its processes and ends them. In a
turn one contender answers, and the others have no work.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.engines import parity
from bench.engines.comparisons import Comparison, comparisons_of, of_running, started
from bench.harness.command import Common, Dtype, run_comparison
from bench.harness.models import Models, PairName
from bench.harness.questions import Question
from bench.harness.report import (
    USUAL_COLUMNS,
    USUAL_LEGEND,
    Columns,
    Say,
    by_case,
    compare,
    conditions,
    finish,
    heat_of,
)
from bench.harness.runner import Case, Contender, Results, Row, Window
from bench.harness.windows import Windows, case_in_window, windows_of
from specdec.cli.processes import StartError

_PROMPT_TOKENS, _TOKENS = 64, 48
_PROMPTS_OF_PARITY = 40
_LEGEND = f"Behind the names: requests at any time; over vLLM: as over first, but vLLM's first line; {USUAL_LEGEND}"


def case_of(
    name: str, contenders: Sequence[Contender], windows: Windows, *, load: int, max_tokens: int, repeats: int
) -> Case:
    """``load`` requests at any time."""

    def take(count: int) -> Sequence[Question]:
        return windows.questions(count, _PROMPT_TOKENS)

    window = Window(load, max_tokens * load)
    return case_in_window(f"{name}, {load}", contenders, take, window=window, max_tokens=max_tokens, repeats=repeats)


def columns(results: Results) -> Columns:
    """The usual ones, and the speed over vLLM itself."""

    def over_vllm(row: Row) -> str:
        peer = next((peer for peer in results.of(row.case) if peer.contender.startswith("vLLM")), None)
        return f"{row.over(peer):.2f} x" if peer else ""

    usual = {name: show for name, show in USUAL_COLUMNS.items() if name != "accepted"}  # 80 columns are full
    return {"tokens/s": usual.pop("tokens/s"), "over vLLM": over_vllm, **usual}


def main(
    common: Common,
    compare_texts: Annotated[
        bool, typer.Option("--parity", help="compare texts of engine vllm with engine torch and transformers")
    ] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="comparisons that begin so, like vllm or torch-draft; may be repeated")
    ] = None,
    requests: Annotated[str, typer.Option(help="numbers of concurrent requests, separated by commas")] = "1,4,16",
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="draft tokens per round, unless adaptive")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="of --parity, each greedy and drawn")] = _PROMPTS_OF_PARITY,
    repeats: Annotated[int, typer.Option(min=1, help="turns; medians are shown")] = 3,
) -> None:
    """Tokens per second of vLLM by itself and of our services on the engines torch and vllm, in float32.

    Default models: smollm2. vLLM does not compile. A running deployment needs --target, for vLLM.
    """
    if not find_spec("vllm"):
        print("specdec: bench engines needs vLLM in the environment that it runs in (make setup-vllm)", file=sys.stderr)
        raise typer.Exit(2)
    if compare_texts and common.is_running:
        raise typer.BadParameter("--parity compares services that it starts, not --url or --address")
    common, max_tokens = replace(common, dtype=Dtype.float32), common.tokens or _TOKENS
    console, results = Console(highlight=False), Results()
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as directory:
        try:
            models = common.models_of_both(PairName.smollm2, Path(directory))
            if compare_texts:
                _compare_texts(models, common, console, num_prompts=prompts, max_tokens=max_tokens)
                return
            comparisons = [of_running()] if common.is_running else comparisons_of(models, only or [""])
        except (StartError, ValueError) as error:
            console.print(str(error), markup=False)
            raise typer.Exit(1) from error
        console.print(conditions(f"{models.label}; float32", max_tokens))
        for comparison in comparisons:

            @asynccontextmanager
            async def prepare(_: Path, say: Say, comparison: Comparison = comparison) -> AsyncIterator[list[Case]]:
                windows = windows_of(common, models)
                async with started(comparison, models, common, num_draft_tokens) as contenders:
                    yield [
                        case_of(comparison.name, contenders, windows, load=load, max_tokens=max_tokens, repeats=repeats)
                        for load in map(int, requests.split(","))
                    ]

            compared = compare(prepare, max_tokens)
            console.print(by_case(compared, columns(compared)), "")
            results.extend(compared)
    finish(common, results, {}, heat_of("Speed over the target alone", results), _LEGEND)


def _compare_texts(models: Models, common: Common, console: Console, *, num_prompts: int, max_tokens: int) -> None:
    """Raises StartError; typer.Exit with status 1 if texts differ where there is no near tie."""
    taken = windows_of(common, models).take(num_prompts, _PROMPT_TOKENS)
    with console.status("Asking"):
        compared = asyncio.run(parity.measure(models, common, taken, max_tokens))
    for divergence in compared.divergences:
        console.print(f"  {divergence}")
    console.print(str(compared))
    if common.json:
        common.json.write_text(json.dumps(asdict(compared) | {"holds": compared.holds}, indent=1) + "\n")
    if not compared.holds:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_comparison(main, "temperature", "dtype")
