"""``specdec bench lookup``: the speedup from prompt lookup, and the cost of one lookup.

Sleeping table models behind the real services generate a repetitive and a non-repetitive text: without a draft, with a
killed one and with a live one, each beside the target alone. Then one lookup in a context is timed, in microseconds.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from typing import Annotated

import typer

from bench.harness.command import run_benchmark
from bench.harness.deployment import Processes
from orchestrator.drafting.prompt_lookup import HitRates, PromptLookup
from specdec.client import Client
from specdec.v1.generation_pb2 import SpeculationStats

_PASS_MS, _STEP_MS, _ACCEPTANCE = 40.0, 4.0, 0.8
_DRAFTS = ("none", "killed", "near", "near, ahead")
_VOCABULARY = 32_000


async def _run(client: Client, tokens: int, seed: int, **fields: int) -> tuple[float, SpeculationStats]:
    """Tokens per second of one request, and its speculation statistics."""
    started = time.perf_counter()
    [sample] = await client.generate(
        token_ids={"token_ids": [1, 2, 3]}, max_tokens=tokens, temperature=1.0, seed=seed, **fields
    )
    return len(sample.token_ids) / (time.perf_counter() - started), sample.finish.speculation


async def _turns(client: Client, tokens: int, repeats: int) -> tuple[list[float], list[float], list[SpeculationStats]]:
    """Tokens per second of each run of the target alone and of each adaptive run, and the statistics of the latter. The
    two modes take turns. The first run of each is a warm-up and is left out."""
    alone, rates, told = [], [], []
    for seed in range(1 + repeats):
        alone.append((await _run(client, tokens, seed, num_draft_tokens=0))[0])
        rate, about = await _run(client, tokens, seed)
        rates.append(rate)
        told.append(about)
    return alone[1:], rates[1:], told[1:]


async def _measure(period: int, draft: str, tokens: int, repeats: int) -> str:
    async with Processes() as made:
        text = (f"--period={period}", f"--acceptance={_ACCEPTANCE}")
        target = await made.model("bench.models.table_service target", f"--pass-ms={_PASS_MS}", *text)
        flags = [f"--target={target.address}", f"--num-ahead-tokens={60 if 'ahead' in draft else 0}"]
        drafter = None
        if draft != "none":
            drafter = await made.model("bench.models.table_service draft", f"--pass-ms={_STEP_MS}", *text)
            flags.append(f"--draft={drafter.address}")
        _, client = await made.orchestrator(*flags)
        if drafter and draft == "killed":
            await _run(client, tokens, 0)
            drafter.process.kill()
        runs, rates, told = await _turns(client, tokens, repeats)
    alone, rate = statistics.median(runs), statistics.median(rates)
    passes = sum(each.num_rounds for each in told) / len(told)
    guessed = sum(each.num_accepted_lookup_tokens for each in told)
    lookup = f"{guessed} of {sum(each.num_lookup_tokens for each in told)}"
    by_draft = sum(each.num_accepted_tokens for each in told) - guessed
    return f"{alone:.1f} | {rate:.1f} | {rate / alone:.2f} | {passes:.0f} | {lookup} | {by_draft}"


def _us_per_look(base: Sequence[int], news: Sequence[int]) -> float:
    """Mean microseconds to append a token and look up, the best of five runs. CPU time."""
    best_s = float("inf")
    for _ in range(5):
        lookup, text = PromptLookup(HitRates()), list(base)
        lookup.chances(text)
        started = time.process_time()
        for token in news:
            text.append(token)
            lookup.chances(text)
        best_s = min(best_s, time.process_time() - started)
    return best_s / len(news) * 1e6


def main(
    tokens: Annotated[int, typer.Option(help="tokens per run")] = 160,
    repeats: Annotated[int, typer.Option(help="runs of each mode, in turns: median speed, sum of tokens")] = 3,
    period: Annotated[int, typer.Option(help="period of the repetitive text, in tokens")] = 40,
) -> None:
    """Measure the speedup from prompt lookup, with and without a draft, and the cost of a lookup."""
    print("| text | draft | alone, tokens/s | adaptive | ratio | passes a run | lookup accepted | draft accepted |")
    print("|---|---|---|---|---|---|---|---|")
    for name, every in (("repetitive", period), ("not repetitive", 0)):
        for draft in _DRAFTS:
            figures = asyncio.run(_measure(every, draft, tokens, repeats))
            print(f"| {name} | {draft} | {figures} |", flush=True)
    print("\n| us per lookup | 1024 ids | 8192 | 32768 |\n|---|---|---|---|")
    dice = random.Random(0)
    contexts = [[dice.randrange(_VOCABULARY) for _ in range(size)] for size in (1024, 8192, 32_768)]
    unseen = [dice.randrange(_VOCABULARY, 2 * _VOCABULARY) for _ in range(1000)]
    print("| no match | " + " | ".join(f"{_us_per_look(each, unseen):.1f}" for each in contexts) + " |")
    print("| copying | " + " | ".join(f"{_us_per_look(each, each[:1000]):.1f}" for each in contexts) + " |")


if __name__ == "__main__":
    run_benchmark(main)
