"""Rows 7 and 9: a distant draft and an unstable draft. Knows how much speculation may slow requests down: by 10 %."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from testing.fault_proxy import FaultProxy
from testing.lab import Deployment
from testing.traffic import Answer, Traffic
from testing.trial import Trial

_STREAMS = 4
_PASS_MS = 20.0  # long beside the message path of a busy machine
_MAX_TIME_RATIO = 1.10
_TURNS = 3  # the first includes the cost of measuring the distance
_ORCHESTRATOR_FLAGS = {"waited for": (), "ahead": ("--num-ahead-tokens=60",)}


async def distant_draft(trial: Trial) -> None:
    """A draft is 50 and 200 ms away. Rounds wait for it, or it grows ahead; both take turns with the target alone."""
    max_tokens = 48 if trial.short else 160
    for name, flags in _ORCHESTRATOR_FLAGS.items():
        async with trial.deployment(pass_ms=_PASS_MS, step_ms=2.0, proxied=True, orchestrator=flags) as running:
            for round_trip_ms in (50, 200):
                running.proxies[running.drafts[0]].set(latency_s=round_trip_ms / 2e3)
                await _pair(trial, running, max_tokens // 2)  # the orchestrator learns the new distance
                pairs = [await _pair(trial, running, max_tokens) for _ in range(_TURNS)]
                _compare(trial, pairs, f"{name}, {round_trip_ms} ms")


async def unstable_draft(trial: Trial) -> None:
    """Connections to a draft are reset and refused every other second for a minute, in both modes of row 7."""
    for name, flags in _ORCHESTRATOR_FLAGS.items():
        async with trial.deployment(pass_ms=_PASS_MS, step_ms=2.0, proxied=True, orchestrator=flags) as running:
            await _pair(trial, running, 64)
            flapping = asyncio.create_task(_flap(running.proxies[running.drafts[0]]))
            try:
                pairs, until = [], time.monotonic() + (8.0 if trial.short else 60.0)
                while time.monotonic() < until:
                    pairs.append(await _pair(trial, running, 100))
            finally:
                flapping.cancel()
            _compare(trial, pairs, name)


async def _flap(proxy: FaultProxy) -> None:
    while True:
        proxy.refuse = not proxy.refuse
        if proxy.refuse:
            proxy.reset()
        await asyncio.sleep(1.0)


_Timed = tuple[float, list[Answer]]


async def _pair(trial: Trial, running: Deployment, max_tokens: int) -> tuple[_Timed, _Timed]:
    """Run the same requests with adaptive drafting and with the target alone; seconds and answers of each run."""
    asked = trial.requests(_STREAMS, max_tokens)
    runs = []
    for requests in (asked, [replace(each, num_draft_tokens=0) for each in asked]):
        started = time.monotonic()
        async with Traffic(running.client, requests) as traffic:
            answers = await traffic.finished()
        runs.append((time.monotonic() - started, answers))
    return runs[0], runs[1]


def _compare(trial: Trial, pairs: list[tuple[_Timed, _Timed]], name: str) -> None:
    answers = [answer for pair in pairs for _, of_run in pair for answer in of_run]
    trial.check_same(answers, f"requests, {name},")
    # The ratio of sums, not the median: about every third run probes the draft's distance and pays a round trip for it.
    ratio = sum(with_draft for (with_draft, _), _ in pairs) / sum(alone for _, (alone, _) in pairs)
    trial.at_most(f"{name}: time over the target's alone", ratio, _MAX_TIME_RATIO, "x")
