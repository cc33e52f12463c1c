"""Rows 17, 18 and 28: more work than capacity, KV slots or timeouts allow. Knows load; causes no faults."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from bench.chaos.outcome import Outcome, percentile
from specdec.cli.processes import is_serving
from specdec.core.errors import Overloaded
from testing.lab import Deployment, Lab, until
from testing.traffic import Answer, Traffic, ask, check_same, several


async def row_17(lab: Lab, seed: int, short: bool) -> Outcome:
    """Poisson arrivals at 10 times the measured capacity for 60 s, open loop; 8 live sequences, a queue of 16."""
    outcome = Outcome()
    seconds = 8.0 if short else 60.0
    flags = ["--max-live-sequences=8", "--max-waiting-requests=16"]
    async with lab.deployment(pass_ms=50.0, orchestrator=flags) as found, _steady():
        peak = await _capacity(lab, found, 4.0 if short else 10.0)
        outcome.note(f"capacity {peak:.1f} requests/s")
        before_mib = found.orchestrator.rss_mib
        answers: list[Answer] = []
        tasks: set[asyncio.Task[Answer]] = set()
        ill = 0
        longest_queue = 0
        started = looked = time.monotonic()
        while (now := time.monotonic()) < started + seconds:
            await asyncio.sleep(lab.chance.expovariate(10 * peak))
            answers.append(Answer(several(1, 60, lab.chance)[0]))
            tasks.add(task := asyncio.create_task(ask(found.client, answers[-1].asked, answers[-1])))
            task.add_done_callback(tasks.discard)
            if now > looked + 0.5:
                looked = now
                ill += not await is_serving(found.orchestrator.address)
                longest_queue = max(longest_queue, (await found.client.server_info()).waiting_requests)
        overloaded_s = time.monotonic() - started
        goodput = sum(answer.sample.finished for answer in answers) / overloaded_s
        recovered_s = await until(lambda: _let_in_at_once(lab, found), 30.0)
        await asyncio.gather(*tasks)
        rejected = [answer for answer in answers if answer.error is not None]
        others = {type(a.error).__name__ for a in rejected} - {"Overloaded"}
        outcome.note(f"{len(answers)} sent, {len(rejected)} rejected")
        outcome.check(not others, f"other errors: {', '.join(others) or 'none'}")
        advised = all(isinstance(a.error, Overloaded) and a.error.retry_after_s > 0 for a in rejected)
        outcome.check(advised, "all rejects have a retry delay")
        times = [answer.ended - answer.started for answer in rejected]
        outcome.note(f"rejects p50 {percentile(times, 0.5) * 1e3:.1f} ms, p99 {percentile(times, 0.99) * 1e3:.1f} ms")
        outcome.at_most("longest reject", max(times) * 1e3, 50.0, "ms")
        check_same(outcome, [a for a in answers if a.error is None], lab.reference, "accepted")
        outcome.at_least("goodput over capacity", goodput / peak, 0.9)
        outcome.at_most("longest queue", longest_queue, 16, "requests")
        outcome.check(not ill, f"{ill} health checks failed")
        outcome.at_most("recovered after", recovered_s, 5.0)
        outcome.at_most("orchestrator grew", found.orchestrator.rss_mib - before_mib, 64.0, "MiB")
    return outcome


@asynccontextmanager
async def _steady() -> AsyncIterator[None]:
    """Disable this process's garbage collector: its pauses of 60 ms would count as the orchestrator's."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _capacity(lab: Lab, found: Deployment, seconds: float) -> float:
    """Requests per second in a closed loop of 16 clients: one request waits for each live one."""
    count = 0
    started = time.monotonic()
    end = started + seconds

    async def steady() -> None:
        nonlocal count
        while time.monotonic() < end:
            await ask(found.client, several(1, 60, lab.chance)[0])
            count += 1

    await asyncio.gather(*(steady() for _ in range(16)))
    return count / (time.monotonic() - started)


async def _let_in_at_once(lab: Lab, found: Deployment) -> bool:
    """Whether the queue is empty and a new request is admitted within 0.1 s."""
    if (await found.client.server_info()).waiting_requests:
        return False
    answer = await ask(found.client, several(1, 1, lab.chance)[0])
    return answer.error is None and answer.admitted - answer.started < 0.1


async def row_18(lab: Lab, seed: int, short: bool) -> Outcome:
    """32 requests need more than 8,192 KV slots of a pool with 4,096: long prompts, and outputs beyond the estimate of
    the admission."""
    outcome = Outcome()
    async with lab.deployment(pass_ms=5.0, step_ms=0.2, target=["--kv-slots=4096"]) as found:
        count = 12 if short else 32
        used = 0
        asked = several(count, 200, lab.chance, 700 if short else 256)
        need = sum(len(each.prompt) + each.max_tokens for each in asked)
        async with Traffic(found.client, asked) as traffic:
            while not all(answer.done for answer in traffic.answers):
                used = max(used, (await found.loads())[0].kv_slots_used)
                await asyncio.sleep(0.05)
            answers = await traffic.finished(60.0)
        outcome.note(f"{need} slots needed, at most {used} of 4096 used")
        check_same(outcome, answers, lab.reference)
        outcome.at_most("replays of one request", max(answer.num_replays for answer in answers), 2, "")
        outcome.note(f"{sum(answer.num_replays for answer in answers)} replays in total")
        outcome.check(found.targets[0].returncode is None, "the target is alive")
        outcome.at_most("slots freed after", await found.freed(), 2.0)
    return outcome


async def row_28(lab: Lab, seed: int, short: bool) -> Outcome:
    """Three prompts of 32,000 ids arrive at once. Prefill, 512 rows a pass, takes several watchdog timeouts (1 s)."""
    outcome = Outcome()
    length = 16_000 if short else 32_000
    target = ["--row-us=20"]
    async with lab.deployment(num_targets=2, pass_ms=50.0, target=target) as found:
        asked = several(3, 40, lab.chance, length)
        passes = sum(load.passes for load in (await found.loads())[:2])
        async with Traffic(found.client, asked) as traffic:
            answers = await traffic.finished(120.0)
        passes = sum(load.passes for load in (await found.loads())[:2]) - passes
        first = [answer.arrivals[0][0] - answer.admitted for answer in answers if answer.arrivals]
        outcome.at_least("first token after", min(first, default=0.0), 1.5 if short else 3.0)
        check_same(outcome, answers, lab.reference)
        replays = sum(answer.num_replays for answer in answers)
        outcome.check(replays == 0, f"{replays} replays")
        # One prefill per request, in shared or separate passes, and at most 40 rounds per request.
        outcome.at_most("passes", passes, 3 * (length // 512 + 1 + 40), "")
    return outcome
