"""Measures the time to first token: of a prompt with a cached prefix, and while a long prompt is in prefill.

Knows requests to our services and their passes; does not know how the services work.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from bench.peers.contender import Settings
from bench.peers.pass_log import now
from bench.peers.prompts import PromptSource
from bench.peers.services import Services

_TAIL_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Latency:
    """Median times in seconds. ``chunk_s`` is the pass of one chunk of the long prompt's prefill."""

    prefix_length: int
    first_with_prefix_s: float
    second_with_prefix_s: float
    long_length: int
    idle_s: float
    under_prefill_s: float
    chunk_s: float

    @property
    def prefix_reuse_ttft(self) -> float:
        return self.first_with_prefix_s / self.second_with_prefix_s

    @property
    def ttft_under_prefill(self) -> float:
        return self.under_prefill_s / (self.idle_s + self.chunk_s)

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


async def measure_latency(
    services: Services,
    prompts: PromptSource,
    choices: Sequence[Settings],
    *,
    short_length: int,
    prefix_length: int,
    long_length: int,
    repeats: int,
    report: Callable[[str], None] = lambda text: None,
) -> tuple[Latency, Settings]:
    """Measure with the settings of ``choices`` that have the shortest time to first token for a short prompt."""
    report("time to first token: calibrating")
    settings = await _soonest(services, prompts, choices, short_length)
    firsts: list[float] = []
    seconds: list[float] = []
    for repeat in range(repeats):
        report(f"time to first token with a known prefix: repetition {repeat + 1} of {repeats}")
        [prefix], salt = prompts.take(1, prefix_length), services.salt()
        for times in (firsts, seconds):
            [tail] = prompts.take(1, _TAIL_TOKENS)
            times.append(await services.time_to_first_token(settings, prefix + tail, salt=salt))
    idle, busy, chunks = [], [], []
    for repeat in range(repeats):
        report(f"time to first token beside a prefill: repetition {repeat + 1} of {repeats}")
        [short], [long] = prompts.take(1, short_length), prompts.take(1, long_length)
        idle.append(await services.time_to_first_token(settings, short))
        waited, chunk = await _beside(services, prompts, settings, short_length, long)
        busy.append(waited)
        chunks.append(chunk)
    median = statistics.median
    latency = Latency(
        prefix_length, median(firsts), median(seconds), long_length, median(idle), median(busy), median(chunks)
    )
    return latency, settings


async def _soonest(
    services: Services, prompts: PromptSource, choices: Sequence[Settings], short_length: int
) -> Settings:
    times = {}
    for settings in choices:
        await services.time_to_first_token(settings, prompts.take(1, short_length)[0], 2)  # warms up
        times[settings] = await services.time_to_first_token(settings, prompts.take(1, short_length)[0])
    return min(times, key=lambda settings: times[settings])


async def _beside(
    services: Services, prompts: PromptSource, settings: Settings, short_length: int, long: list[int]
) -> tuple[float, float]:
    """The median time to first token of short requests, sent one after the other while a long prompt is in prefill, and
    the median time of one chunk of that prefill."""
    threads = settings.threads[0]
    started = now()
    prefill = asyncio.create_task(services.time_to_first_token(settings, long, 2))
    try:
        # After one chunk is done, the next is running.
        while not services.passes("target", threads, started):  # noqa: ASYNC110 another process writes the file
            await asyncio.sleep(0.005)
        waited: list[float] = []
        while not waited or not prefill.done():
            [short] = prompts.take(1, short_length)
            waited.append(await services.time_to_first_token(settings, short, 2))
    finally:
        await prefill
    passes = services.passes("target", threads, started)
    most = max(each.rows for each in passes)
    chunks = [each.seconds for each in passes if each.rows > most // 2]
    return statistics.median(waited), statistics.median(chunks)
