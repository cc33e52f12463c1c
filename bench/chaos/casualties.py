"""Rows 19 and 27: the effect of one failure on other requests. Knows failpoints and load; does not know the network."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack
from dataclasses import replace

from bench.chaos.outcome import Outcome, percentile
from testing.lab import Lab, Process
from testing.traffic import Traffic, check_same, several

_POISON = 1023


async def row_19(lab: Lab, seed: int, short: bool) -> Outcome:
    """A poisonous request runs among 24 others on three targets: every pass with its text raises. Then a request with
    a text that ends the process, which is started again."""
    outcome = Outcome()
    for flag in ("--fail-on-token", "--crash-on-token"):
        async with lab.deployment(num_targets=3, target=[f"{flag}={_POISON}"]) as found:
            # The other requests must not contain or generate the poison token.
            wanted = 8 if short else 24
            innocent = [
                each
                for each in several(20 * wanted, 200, lab.chance)
                if _POISON not in (*each.prompt, *each.expected(lab.reference))
            ][:wanted]
            poison = replace(innocent[0], prompt=(*innocent[0].prompt, _POISON), seed=7)
            async with Traffic(found.client, innocent) as traffic, AsyncExitStack() as stack:
                await traffic.reached(0.2)
                other = await stack.enter_async_context(Traffic(found.client, [poison]))
                restarts = asyncio.create_task(_keep_alive(found.targets))
                [end] = await other.finished(30.0)
                answers = await traffic.finished(60.0)
                restarts.cancel()
            reason = getattr(end.error, "reason", str(end.error))
            outcome.check(reason == "GIVEN_UP", f"{flag}: the poison ends with {reason}: {end.error}")
            check_same(outcome, answers, lab.reference, "others")
            crashes = sum(each.num_starts - 1 for each in found.targets)
            crashes += sum(each.returncode is not None for each in found.targets)
            failures = sum(each.tracebacks() for each in found.targets)
            outcome.at_most(f"{flag}: replicas stopped", crashes, 2 if "crash" in flag else 0, "")
            # A failed pass leaves its replica alive and counts as half a crash, so it may fail more often. Each is
            # computed again for the text alone, and fails again.
            outcome.at_most(f"{flag}: failed passes", failures, 8, "")
            outcome.note(f"{flag}: {sum(answer.num_replays for answer in answers)} replays of others")
    return outcome


async def _keep_alive(processes: list[Process]) -> None:
    while True:
        await asyncio.sleep(0.3)
        for each in processes:
            if each.returncode is not None:
                await each.start()


async def row_27(lab: Lab, seed: int, short: bool) -> Outcome:
    """One of two targets is killed with about 100 long sequences on it (prompts of 1,000 ids, 5 us a row). The time per
    token of the sequences on the other target is measured before the kill and while the moved sequences arrive."""
    outcome = Outcome()
    count = 24 if short else 200
    async with lab.deployment(num_targets=2, pass_ms=20.0, target=["--row-us=5"]) as found:
        victim = lab.chance.choice(found.targets)
        async with Traffic(found.client, several(count, 700, lab.chance, 1000)) as traffic:
            await traffic.reached(0.15, 120.0)
            await asyncio.sleep(1.0)
            window_s = 2.0
            killed = time.monotonic()
            lost = (await found.loads())[found.targets.index(victim)].live_sequences
            await victim.kill()
            answers = await traffic.finished(200.0)
        check_same(outcome, answers, lab.reference)
        outcome.note(f"{lost} sequences were on the killed target")
        others = [answer for answer in answers if not answer.num_replays and answer.ended > killed + window_s]
        before = [window_s / max(1, a.tokens_between(killed - window_s, killed)) for a in others]
        after = [window_s / max(1, a.tokens_between(killed, killed + window_s)) for a in others]
        ratio = percentile(after, 0.5) / max(1e-9, percentile(before, 0.5))
        outcome.note(f"{len(others)} others, {percentile(before, 0.5) * 1e3:.1f} ms per token before")
        outcome.at_most("their time per token in the 2 s after", ratio, 2.0, "times")
        gaps = [
            max((b - a for (a, _), (b, _) in zip(x.arrivals, x.arrivals[1:], strict=False) if b > killed), default=0.0)
            for x in answers
            if x.num_replays
        ]
        outcome.note(f"moved sequences: gap p50 {percentile(gaps, 0.5):.2f} s, longest {max(gaps, default=0.0):.2f} s")
    return outcome
