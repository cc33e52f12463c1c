"""Rows 7 and 9: a distant draft and an unstable draft. Knows how much speculation may slow requests down: by 10 %."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from bench.chaos.outcome import Outcome
from testing.fault_proxy import FaultProxy
from testing.lab import Deployment, Lab
from testing.traffic import Answer, Traffic, check_same, several

_STREAMS = 4
_PASS_MS = 20.0  # long beside the message path of a busy machine
_MAX_TIME_RATIO = 1.10
_TURNS = 3  # the first includes the cost of measuring the distance
_ORCHESTRATOR_FLAGS = {"waited for": (), "ahead": ("--num-ahead-tokens=60",)}


async def row_07(lab: Lab, seed: int, short: bool) -> Outcome:
    """A draft is 50 and 200 ms away. Rounds wait for it, or it grows ahead; both take turns with the target alone."""
    outcome = Outcome()
    max_tokens = 48 if short else 160
    for name, flags in _ORCHESTRATOR_FLAGS.items():
        async with lab.deployment(pass_ms=_PASS_MS, step_ms=2.0, proxied=True, orchestrator=flags) as found:
            for round_trip_ms in (50, 200):
                found.proxies[found.drafts[0]].set(latency_s=round_trip_ms / 2e3)
                await _pair(found, lab, max_tokens // 2)  # the orchestrator learns the new distance
                pairs = [await _pair(found, lab, max_tokens) for _ in range(_TURNS)]
                _compare(outcome, lab, pairs, f"{name}, {round_trip_ms} ms")
    return outcome


async def row_09(lab: Lab, seed: int, short: bool) -> Outcome:
    """Connections to a draft are reset and refused every other second for a minute, in both modes of row 7."""
    outcome = Outcome()
    lasts_s = 8.0 if short else 60.0
    for name, flags in _ORCHESTRATOR_FLAGS.items():
        async with lab.deployment(pass_ms=_PASS_MS, step_ms=2.0, proxied=True, orchestrator=flags) as found:
            await _pair(found, lab, 64)
            flapping = asyncio.create_task(_flap(found.proxies[found.drafts[0]]))
            try:
                pairs, until = [], time.monotonic() + lasts_s
                while time.monotonic() < until:
                    pairs.append(await _pair(found, lab, 100))
            finally:
                flapping.cancel()
            _compare(outcome, lab, pairs, name)
    return outcome


async def _flap(proxy: FaultProxy) -> None:
    while True:
        proxy.refuse = not proxy.refuse
        if proxy.refuse:
            proxy.reset()
        await asyncio.sleep(1.0)


_Timed = tuple[float, list[Answer]]


async def _pair(found: Deployment, lab: Lab, max_tokens: int) -> tuple[_Timed, _Timed]:
    """Run the same requests with adaptive drafting and with the target alone; seconds and answers of each run."""
    asked = several(_STREAMS, max_tokens, lab.chance)
    runs = []
    for each in (asked, [replace(one, num_draft_tokens=0) for one in asked]):
        started = time.monotonic()
        async with Traffic(found.client, each) as traffic:
            answers = await traffic.finished()
        runs.append((time.monotonic() - started, answers))
    return runs[0], runs[1]


def _compare(outcome: Outcome, lab: Lab, pairs: list[tuple[_Timed, _Timed]], name: str) -> None:
    answers = [answer for pair in pairs for _, of_run in pair for answer in of_run]
    check_same(outcome, answers, lab.reference, f"requests, {name},")
    # The ratio of sums, not the median: about every third run probes the draft's distance and pays a round trip for it.
    ratio = sum(with_draft for (with_draft, _), _ in pairs) / sum(alone for _, (alone, _) in pairs)
    outcome.at_most(f"{name}: time over the target's alone", ratio, _MAX_TIME_RATIO, "x")
