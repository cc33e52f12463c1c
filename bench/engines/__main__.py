"""``specdec bench engines``: vLLM's own generate and our services on the engines torch and vllm, by turns, greedy."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from bench.engines import generators, parity
from bench.engines.serving import ENGINES, serving
from bench.harness.command import Common, Dtype, run_comparison
from bench.harness.deployment import Processes
from bench.harness.endpoints import Endpoint
from bench.harness.methods import Method
from bench.harness.models import Models, PairName
from bench.harness.report import USUAL_COLUMNS, USUAL_LEGEND, Say, by_case, compare, conditions, finish, heat_of
from bench.harness.runner import Case, Contender
from bench.harness.windows import windows_of
from specdec.cli.processes import StartError
from specdec.runner.checkpoint import Checkpoint

_PROMPT_TOKENS, _TOKENS = 64, 48
_PROMPTS_OF_PARITY = 40


def of_services(name: str, endpoint: Endpoint, num_draft_tokens: int | None, is_exact: bool) -> list[Contender]:
    """The target alone, with a number of draft tokens (None: without a draft), and with the chosen number.

    ``is_exact``: all give the same texts; on vLLM near ties may differ.
    """
    alone = Contender(f"{name}, target alone", endpoint.asks(num_draft_tokens=0))
    same_as = alone.name if is_exact else ""
    drafting = Contender(f"{name}, adaptive", endpoint.asks(), same_as)
    if num_draft_tokens is None:
        return [alone, drafting]
    fixed = endpoint.asks(num_draft_tokens=num_draft_tokens)
    return [alone, Contender(f"{name}, K = {num_draft_tokens}", fixed, same_as), drafting]


async def contenders_of(models: Models, common: Common, number: int, stack: AsyncExitStack) -> list[Contender]:
    """vLLM's generate is the first one. Raises StartError."""
    ends = Checkpoint.find(models.target, "float32").info.eos_token_ids
    draft = next(iter(models.drafts), "")
    contenders = []
    for how in generators.HOW:
        if draft or how != "draft_model":
            started = generators.running(models.target, draft, how, common.threads, number, end_token_ids=ends)
            contenders.append(Contender(f"vLLM {how}", (await stack.enter_async_context(started)).ask))
    if common.is_running:
        endpoint = await stack.enter_async_context(common.endpoint())
        return contenders + of_services("as deployed", endpoint, number, is_exact=False)
    processes = await stack.enter_async_context(Processes())
    for engine in ENGINES:
        head = next((f"--head={head}" for head in models.heads), "") if engine == "torch" and not draft else ""
        endpoint = await serving(processes, common, models.target, engine).endpoint(Method(head, draft))
        drafted = number if draft or head else None
        contenders += of_services(f"{engine} services", endpoint, drafted, is_exact=engine == "torch")
    return contenders


def main(
    common: Common,
    compare_texts: Annotated[
        bool, typer.Option("--parity", help="compare texts of engine vllm with engine torch and transformers")
    ] = False,
    requests: Annotated[str, typer.Option(help="numbers of concurrent requests, separated by commas")] = "1,4,16",
    num_draft_tokens: Annotated[int, typer.Option(min=1, help="draft tokens per round, unless adaptive")] = 4,
    prompts: Annotated[int, typer.Option(min=1, help="of --parity, each greedy and drawn")] = _PROMPTS_OF_PARITY,
    repeats: Annotated[int, typer.Option(min=1, help="turns; medians are shown")] = 3,
) -> None:
    """Tokens per second of vLLM's own generate and of our services on the engines torch and vllm, in float32.

    Default models: smollm2. vLLM does not compile. A running deployment needs --target, for vLLM.
    """
    if not find_spec("vllm"):
        print("specdec: bench engines needs vLLM in the environment that it runs in (make setup-vllm)", file=sys.stderr)
        raise typer.Exit(2)
    common, max_tokens = replace(common, dtype=Dtype.float32), common.tokens or _TOKENS
    if compare_texts:
        _compare_texts(common, prompts, max_tokens)
        return

    @asynccontextmanager
    async def prepare(directory: Path, say: Say) -> AsyncIterator[list[Case]]:
        models = common.models_of_both(PairName.smollm2, directory)
        say(conditions(f"{models.label}; float32", max_tokens))
        windows = windows_of(common, models)
        async with AsyncExitStack() as stack:
            contenders = await contenders_of(models, common, num_draft_tokens, stack)
            cases = []
            for number in map(int, requests.split(",")):
                turns = [windows.questions(number, _PROMPT_TOKENS) for _ in range(1 + repeats)]
                name = "1 request" if number == 1 else f"{number} requests"
                cases.append(Case(name, turns, contenders, num_warm_ups=1, salt=name))
            yield cases

    results = compare(prepare, max_tokens)
    tables = {"Tokens per second, greedy; over vLLM's generate": by_case(results, USUAL_COLUMNS)}
    finish(common, results, tables, heat_of("Speed over vLLM's generate", results), USUAL_LEGEND)


def _compare_texts(common: Common, num_prompts: int, max_tokens: int) -> None:
    """Raises typer.Exit with status 1 if texts differ where there is no near tie."""
    console = Console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="specdec-bench-") as directory, console.status("Asking"):
        try:
            models = common.models(PairName.smollm2, Path(directory))
            taken = windows_of(common, models).take(num_prompts, _PROMPT_TOKENS)
            compared = asyncio.run(parity.measure(models, common, taken, max_tokens))
        except (StartError, ValueError) as error:
            console.print(str(error), markup=False)
            raise typer.Exit(1) from error
    for divergence in compared.divergences:
        console.print(f"  {divergence}")
    console.print(str(compared))
    if common.json:
        common.json.write_text(json.dumps(asdict(compared) | {"holds": compared.holds}, indent=1) + "\n")
    if not compared.holds:
        raise typer.Exit(1)


if __name__ == "__main__":
    run_comparison(main, "temperature", "dtype")
