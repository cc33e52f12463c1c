"""``specdec bench load``: what drafting gives at growing load, beside the formula.

Table models behind the real services: a pass takes a fixed time and some for each row, as on a GPU. So draft tokens
cost little beside one request and much beside a hundred. How much is drafted is chosen; every text is compared.

The formula is that of the policy: the number k of draft tokens with the most tokens per second, where n requests have k
each, or none. goodput(k) = n E[accepted + 1] / (drafting(k) + pass(n (k + 1))).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.harness.command import run_benchmark
from bench.harness.deployment import Processes
from specdec.client import Client

PASS_MS, ROW_US, STEP_MS, ACCEPTANCE, PERIOD = 20.0, 150.0, 1.0, 0.75, 32
_MOST = 8
"""Draft tokens of a round at most if the number is chosen; 16 of a lookup."""


def pass_ms(rows: int) -> float:
    return PASS_MS + ROW_US * rows / 1e3


def formula(method: str, requests: int, tokens: int) -> float:
    """The speed over the target alone."""
    alone = pass_ms(requests)

    def seconds(k: int) -> float:
        """Of a token, in units of the target alone's."""
        if method == "lookup":  # all is right once the text has begun to repeat itself
            repeated = (tokens - PERIOD) / (k + 1) * pass_ms(requests * (k + 1))
            return (PERIOD * alone + repeated) / tokens / alone
        expected = sum(ACCEPTANCE**number for number in range(k + 1))
        drafting_ms = STEP_MS * k if method == "draft" else 0.0
        return (drafting_ms + pass_ms(requests * (k + 1))) / expected / alone

    return 1 / min(map(seconds, range((16 if method == "lookup" else _MOST) + 1)))


async def _rate(client: Client, requests: int, tokens: int, number: int | None) -> tuple[float, list[list[int]]]:
    """Tokens per second of all requests, and their texts."""
    fixed = {} if number is None else {"num_draft_tokens": number}

    async def one(seed: int) -> list[int]:
        [sample] = await client.generate(token_ids={"token_ids": [1, 2, seed]}, max_tokens=tokens, seed=seed, **fixed)
        return list(sample.token_ids)

    started = time.perf_counter()
    texts = await asyncio.gather(*map(one, range(requests)))
    return requests * tokens / (time.perf_counter() - started), texts


async def measure(loads: list[int], tokens: int, done: Callable[[], None]) -> list[tuple[int, str, float, float]]:
    """Requests, method, tokens per second and the speed over the target alone. Raises StartError, and ValueError if a
    text differs."""
    cost = [f"--pass-ms={PASS_MS}", f"--row-us={ROW_US}"]
    text = [f"--acceptance={ACCEPTANCE}", "--max-sequences=4096"]
    async with Processes() as made:
        target = "bench.models.table_service target"
        plain = await made.model(target, *cost, *text)
        headed = await made.model(target, *cost, *text, "--self-drafts")
        repeating = await made.model(target, *cost, *text, f"--period={PERIOD}")
        draft = await made.model("bench.models.table_service draft", f"--pass-ms={STEP_MS}", *text)
        _, by_lookup = await made.orchestrator(f"--target={repeating.address}")
        _, by_draft = await made.orchestrator(f"--target={plain.address}", f"--draft={draft.address}")
        _, self_drafts = await made.orchestrator(f"--target={headed.address}")
        found = []
        for requests in loads:
            for method, client in (("lookup", by_lookup), ("draft", by_draft), ("head", self_drafts)):
                await _rate(client, requests, tokens, None)  # the policy learns
                alone, expected = await _rate(client, requests, tokens, 0)
                rate, texts = await _rate(client, requests, tokens, None)
                if texts != expected:
                    raise ValueError(f"the texts of {requests} requests differ with {method}")
                found.append((requests, method, rate, rate / alone))
                done()
        return found


def main(
    requests: Annotated[str, typer.Option(help="numbers of concurrent requests, separated by commas")] = "1,8,32,128",
    tokens: Annotated[int, typer.Option(min=64, help="tokens of each answer")] = 160,
) -> None:
    """Tokens per second over the target alone by the number of requests, beside the formula, with table models."""
    console, loads = Console(highlight=False), [int(each) for each in requests.split(",")]
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("Asking", total=3 * len(loads))
        found = asyncio.run(measure(loads, tokens, lambda: progress.advance(bar)))
    table = Table("requests", "method", "tokens/s", "over alone", "formula", box=None, header_style="bold")
    for number, method, rate, ratio in found:
        row = (f"{rate:.0f}", f"{ratio:.2f} x", f"{formula(method, number, tokens):.2f} x")
        table.add_row(str(number), method, *row)
    console.print(table)
    told = f"pass {PASS_MS:g} ms and {ROW_US:g} us per row; acceptance {ACCEPTANCE:g}, {STEP_MS:g} ms per draft token;"
    console.print(f"{told} lookup: a text that repeats itself every {PERIOD} tokens; all texts are equal", style="dim")


if __name__ == "__main__":
    run_benchmark(main)
