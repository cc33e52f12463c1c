"""Rows 19 and 27: the effect of one failure on other requests. Knows failpoints and load; does not know the network."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace

from testing import process_faults
from testing.traffic import Traffic, percentile
from testing.trial import Trial, num_replays

_POISON = 1023


async def poison_request(trial: Trial) -> None:
    """A poisonous request runs among 24 others on three targets: every pass with its text raises. Then a request with
    a text that ends the process, which is started again."""
    for flag in ("--fail-on-token", "--crash-on-token"):
        async with trial.deployment(num_targets=3, target=[f"{flag}={_POISON}"]) as running:
            count = 8 if trial.short else 24
            # The other requests must not contain or generate the poison token.
            harmless = (
                each
                for each in trial.requests(20 * count, 200)
                if _POISON not in (*each.prompt, *each.expected(trial.reference))
            )
            innocent = list(itertools.islice(harmless, count))
            poisonous = replace(innocent[0], prompt=(*innocent[0].prompt, _POISON), seed=7)
            answers = await process_faults.poison(trial, running, innocent, poisonous, flag)
            crashes = sum(target.num_starts - 1 for target in running.targets)
            crashes += sum(target.returncode is not None for target in running.targets)
            failures = sum(target.num_logged("what was computed for") for target in running.targets)
            trial.at_most(f"{flag}: replicas stopped", crashes, 2 if "crash" in flag else 0, "")
            # A failed pass leaves its replica alive and counts as half a crash, so it may fail more often.
            trial.at_most(f"{flag}: failed passes", failures, 4, "")
            trial.note(f"{flag}: {num_replays(answers)} replays of others")


async def moved_sequences(trial: Trial) -> None:
    """One of two targets is killed with about 100 long sequences on it (prompts of 1,000 ids, 5 us a row). The time per
    token of the sequences on the other target is measured before the kill and while the moved sequences arrive."""
    window_s = 2.0
    async with (
        trial.deployment(num_targets=2, pass_ms=20.0, target=["--row-us=5"]) as running,
        Traffic(running.client, trial.requests(24 if trial.short else 200, 700, 1000)) as traffic,
    ):
        await traffic.reached(0.15, 120.0)
        await asyncio.sleep(1.0)
        killed = time.monotonic()
        victim = await running.busiest_target()
        num_lost = (await running.loads())[running.targets.index(victim)].live_sequences
        await victim.kill()
        answers = await traffic.finished(200.0)
    trial.check_same(answers)
    trial.note(f"{num_lost} sequences were on the killed target")
    others = [answer for answer in answers if not answer.num_replays and answer.ended > killed + window_s]
    before, after = (
        percentile((window_s / max(1, answer.tokens_between(start, start + window_s)) for answer in others), 0.5)
        for start in (killed - window_s, killed)
    )
    trial.note(f"{len(others)} others, {before * 1e3:.1f} ms per token before")
    trial.at_most("their time per token in the 2 s after", after / max(1e-9, before), 2.0, "times")
    gaps = [answer.longest_gap(since=killed) or 0.0 for answer in answers if answer.num_replays]
    trial.note(f"moved sequences: gap p50 {percentile(gaps, 0.5):.2f} s, longest {max(gaps, default=0.0):.2f} s")
