"""Row 32: requests that are large, beside streams of others. Knows sizes; does not know faults of the services."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from specdec.cli.processes import is_serving
from specdec.client import Client
from specdec.core.errors import ContextExceeded, InvalidArgument
from testing.lab import start, until
from testing.traffic import percentile
from testing.trial import Trial

_TOKENIZER = Path(__file__).parents[2] / "models" / "demo" / "target" / "tokenizer.json"
_LONGEST_GAP_MS = 100.0
_CONTEXT = 140_000
_SEED: dict[str, Any] = {"seed": 1, "temperature": 0.0, "num_draft_tokens": 0}


async def large_requests(trial: Trial) -> None:
    """Beside 4 streams: prompts of 1 MB that are tokenized and then refused, three at a time; then requests with n = 64
    of 131,072 ids, which the first of them brings and the second finds cached; then 64 schemas as large as is allowed,
    and 64 that are refused."""
    length = 32_768 if trial.short else 131_072
    async with _deployment(trial) as client:
        ids = [trial.chance.randrange(4096) for _ in range(length)]
        samples = {"token_ids": {"token_ids": ids}, "max_tokens": 4, "n": 64, **_SEED}
        async with _streams(client, 4) as gaps:
            await asyncio.sleep(2.0)
            _note(trial, gaps, "alone")
            for _ in range(1 if trial.short else 3):
                await asyncio.gather(*(_refused(client, trial) for _ in range(3)))
            _note(trial, gaps, "beside refused prompts of 1 MB")
            await client.generate(**samples)
            # Measured only: 64 prompts that nothing shares yet are read, sent and looked up in full.
            trial.note(f"longest gap beside n = 64 of {length} new ids {max(gaps, default=0.0) * 1e3:.0f} ms")
            gaps.clear()
            await client.generate(**samples)
            _note(trial, gaps, f"beside n = 64 of {length} cached ids")
            count = 16 if trial.short else 64
            await asyncio.gather(*(_structured(client, number) for number in range(count)))
            _note(trial, gaps, f"beside {count} schemas of 32 KB")
            await asyncio.gather(*(_misshapen(client, trial, number) for number in range(count)))
            _note(trial, gaps, f"beside {count} schemas that are refused")


@asynccontextmanager
async def _deployment(trial: Trial) -> AsyncIterator[Client]:
    async with trial.processes() as make:
        target = make("bench.chaos.blank_service", f"--context-length={_CONTEXT}", f"--tokenizer={_TOKENIZER}")
        front = make("orchestrator", f"--target={target.address}", f"--tokenizer={_TOKENIZER}")
        await start(target, front)
        await until(lambda: is_serving(front.address), 30.0)
        async with Client(front.address) as client:
            await client.generate(token_ids={"token_ids": [1]}, max_tokens=1, **_SEED)
            yield client


@asynccontextmanager
async def _streams(client: Client, count: int) -> AsyncIterator[list[float]]:
    """So many streams, and the seconds between their chunks so far."""
    gaps: list[float] = []

    async def read() -> None:
        last = 0.0
        async for _ in client.stream(token_ids={"token_ids": [1, 2, 3]}, max_tokens=_CONTEXT - 100, **_SEED):
            now = time.monotonic()
            if last:
                gaps.append(now - last)
            last = now

    readers = [asyncio.create_task(read()) for _ in range(count)]
    try:
        yield gaps
        for reader in readers:
            if reader.done():
                reader.result()
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _refused(client: Client, trial: Trial) -> None:
    with contextlib.suppress(ContextExceeded):
        await client.generate(text="def f(x):\n    return x + 1\n" * 38_000, max_tokens=1, **_SEED)
        trial.check(False, "a prompt beyond the context was served")


async def _structured(client: Client, number: int) -> None:
    values = [f"value {number} {place}" for place in range(1_500)]
    schema = json.dumps({"type": "object", "properties": {"a": {"enum": values}}, "required": ["a"]})
    await client.generate(text="x", json_schema=schema[:32_768], max_tokens=8, **_SEED)


async def _misshapen(client: Client, trial: Trial, number: int) -> None:
    deep = '{"type": "array", "items": ' * 1_000 + "{}" + "}" * 1_000
    for schema in (deep, json.dumps({"pattern": f"^(a{{1,{9_000 + number}}}){{1,9000}}$"})):
        with contextlib.suppress(InvalidArgument):
            await client.generate(text="x", json_schema=schema, max_tokens=1, **_SEED)


def _note(trial: Trial, gaps: list[float], what: str) -> None:
    """The gaps since the last note."""
    trial.at_most(f"longest gap {what}", max(gaps, default=float("inf")) * 1e3, _LONGEST_GAP_MS, "ms")
    trial.note(f"p99 {percentile(gaps, 0.99) * 1e3:.1f} ms, {len(gaps)} chunks")
    gaps.clear()
