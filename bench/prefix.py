"""``specdec bench prefix``: what it gives that prompts which begin alike share targets.

Conversations that share system prompts ask four targets, table models that find former texts again. By turns they come
through an orchestrator that chooses by load alone, through one that chooses by prefix, and through two of these that
know nothing of each other. At last the target that most prompts name is killed in the middle. Every text is compared.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Shown

from bench.harness.command import run_benchmark
from bench.harness.deployment import Processes
from bench.harness.report import conclude
from specdec.cli.processes import Service
from specdec.client import Client, Sample
from specdec.core.sequence import SamplingParams, SequenceSpec
from testing.table_model import Table

NUM_TARGETS, NUM_SYSTEM_PROMPTS = 4, 4
BY_LOAD, BY_PREFIX, BY_TWO, KILLED = "by load", "by prefix", "by 2 orchestrators", "a target killed"
_PASS_MS, _ROW_US, _CHUNK_ROWS = 20.0, 200.0, 256
_SYSTEM_IDS, _USER_IDS, _ANSWER_IDS = 512, 48, 32
_PAUSE_S = 0.5
"""Mean time from an answer to the next question."""
_TABLE = Table()


@dataclass(slots=True)
class Figures:
    """Of the requests of one contender; times in seconds."""

    first_s: list[float] = field(default_factory=list)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    seconds: float = 0.0
    hits: int = 0
    spills: int = 0
    num_wrong: int = 0

    def summary(self) -> dict[str, float]:
        first = statistics.quantiles(self.first_s, n=10)
        return {
            "requests": len(self.first_s),
            "cached share": self.num_cached_tokens / self.num_prompt_tokens,
            "first token, ms": 1e3 * statistics.median(self.first_s),
            "its p90": 1e3 * first[-1],
            "seconds": self.seconds,
            "hits": self.hits,
            "spills": self.spills,
            "wrong": self.num_wrong,
        }


@dataclass(frozen=True, slots=True)
class Load:
    """``cached_ids``: of former texts that a target finds again."""

    num_conversations: int
    num_turns: int
    cached_ids: int


async def converse(clients: Sequence[Client], number: int, num_turns: int, seed: int, figures: Figures) -> None:
    """One conversation. Its turns go to the clients one after the other; ``seed``: other texts for each run."""
    chance = random.Random(f"{seed} {number}")
    system = random.Random(f"{seed} system {number % NUM_SYSTEM_PROMPTS}")
    ids = [system.randrange(_TABLE.vocab_size) for _ in range(_SYSTEM_IDS)]
    for turn in range(num_turns):
        await asyncio.sleep(chance.expovariate(1 / _PAUSE_S))
        ids += [chance.randrange(_TABLE.vocab_size) for _ in range(_USER_IDS)]
        sample = await _ask(clients[(number + turn) % len(clients)], ids, figures)
        spec = SequenceSpec(tuple(ids), len(ids), SamplingParams(temperature=0.0))
        figures.num_wrong += sample.token_ids != _TABLE.text(spec, _ANSWER_IDS)
        ids += sample.token_ids


async def _ask(client: Client, ids: list[int], figures: Figures) -> Sample:
    started, sample = time.perf_counter(), Sample()
    fields: dict[str, Any] = {"token_ids": {"token_ids": ids}, "max_tokens": _ANSWER_IDS, "temperature": 0.0}
    async with aclosing(client.stream(**fields)) as responses:
        async for response in responses:
            if response.HasField("chunk"):
                if not sample.token_ids:
                    figures.first_s.append(time.perf_counter() - started)
                sample.add(response.chunk)
    figures.num_prompt_tokens += sample.finish.usage.prompt_tokens
    figures.num_cached_tokens += sample.finish.usage.cached_prompt_tokens
    return sample


async def _choices(clients: Sequence[Client]) -> tuple[int, int]:
    """Hits and spills of targets so far."""
    replicas = [replica for client in clients for replica in (await client.server_info()).replicas]
    return sum(r.prefix_hits for r in replicas), sum(r.prefix_spills for r in replicas)


async def run(
    clients: Sequence[Client], load: Load, seed: int, figures: Figures, victims: Sequence[Service] = ()
) -> None:
    """All conversations at the same time. The favoured one of ``victims`` is killed when half of the requests have
    their first token."""
    hits, spills = await _choices(clients)
    started, num_before = time.perf_counter(), len(figures.first_s)
    conversations = [
        asyncio.create_task(converse(clients, number, load.num_turns, seed, figures))
        for number in range(load.num_conversations)
    ]
    try:
        if victims:
            while len(figures.first_s) - num_before < load.num_conversations * load.num_turns / 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            hits_of = {r.address: r.prefix_hits for r in (await clients[0].server_info()).replicas}
            max(victims, key=lambda target: hits_of[target.address]).process.kill()
        await asyncio.gather(*conversations)
    finally:
        for conversation in conversations:
            conversation.cancel()
    figures.seconds += time.perf_counter() - started
    after = await _choices(clients)
    figures.hits += after[0] - hits
    figures.spills += after[1] - spills


async def measure(load: Load, repeats: int) -> dict[str, Figures]:
    """By contender."""
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(Processes())
        flags = [f"--pass-ms={_PASS_MS}", f"--row-us={_ROW_US}", f"--chunk-rows={_CHUNK_ROWS}"]
        flags.append(f"--cached-blocks={load.cached_ids // 16}")
        targets = [await processes.model("testing.table_service target", *flags) for _ in range(NUM_TARGETS)]
        addresses = f"--target={','.join(target.address for target in targets)}"
        _, by_load = await processes.orchestrator(addresses, "--no-prefix-choice")
        first, second = [(await processes.orchestrator(addresses))[1] for _ in range(2)]
        contenders = {BY_LOAD: [by_load], BY_PREFIX: [first], BY_TWO: [first, second]}
        figures = {name: Figures() for name in (*contenders, KILLED)}
        for turn in range(repeats):
            names = [*list(contenders)[turn % len(contenders) :], *list(contenders)[: turn % len(contenders)]]
            for index, name in enumerate(names):
                await run(contenders[name], load, 100 * turn + index, figures[name])
        await run([first, second], load, -1, figures[KILLED], victims=targets)
    return figures


def shown(figures: Mapping[str, Figures]) -> Shown:
    table = Shown(header_style="bold", box=None, padding=(0, 1, 0, 0))
    for name in ("", *next(iter(figures.values())).summary()):
        table.add_column(name, justify="right" if name else "left", overflow="fold")
    for name, of_contender in figures.items():
        cells = of_contender.summary().items()
        table.add_row(name, *(f"{value:.2f}" if "share" in column else f"{value:.0f}" for column, value in cells))
    return table


def main(
    conversations: Annotated[int, typer.Option(min=1, help="at the same time")] = 64,
    turns: Annotated[int, typer.Option(min=1, help="of each conversation")] = 8,
    cached_ids: Annotated[int, typer.Option(min=16, help="ids of former texts that a target finds again")] = 16384,
    repeats: Annotated[int, typer.Option(min=1, help="runs of each contender")] = 2,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write the figures to a file")
    ] = None,
) -> None:
    """Conversations with common system prompts at 4 targets: cached share of their prompts, time to the first token."""
    console = Console(highlight=False)
    with console.status("measuring ..."):
        figures = asyncio.run(measure(Load(conversations, turns, cached_ids), repeats))
    console.print(
        f"Table models: {NUM_TARGETS} targets, {_PASS_MS:g} ms a pass and {_ROW_US:g} us a row; {conversations}"
        f" conversations of {turns} turns, {NUM_SYSTEM_PROMPTS} system prompts of {_SYSTEM_IDS} ids;"
        f" caches of {cached_ids} ids; {os.cpu_count()} cores"
    )
    console.print(shown(figures))
    num_wrong = sum(f.num_wrong for f in figures.values())
    conclude(console, json_file, {name: f.summary() for name, f in figures.items()}, num_wrong=num_wrong)


if __name__ == "__main__":
    run_benchmark(main)
