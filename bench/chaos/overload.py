"""Rows 17, 18 and 28: more work than capacity, KV slots or timeouts allow. Knows load; causes no faults."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from specdec.cli.processes import is_serving
from specdec.client import Client
from specdec.core.errors import Overloaded
from testing.lab import Deployment, until
from testing.traffic import Answer, Traffic, ask, percentile
from testing.trial import Trial, num_replays


async def overload(trial: Trial) -> None:
    """Poisson arrivals at 10 times the measured capacity for 60 s, open loop; 8 live sequences, a queue of 16."""
    flags = ["--max-live-sequences=8", "--max-waiting-requests=16"]
    async with trial.deployment(pass_ms=50.0, orchestrator=flags) as running, _no_garbage_collection():
        capacity = await capacity_of(trial, running.client, 4.0 if trial.short else 10.0)
        trial.note(f"capacity {capacity:.1f} requests/s")
        before_mib = running.orchestrator.rss_mib
        answers: list[Answer] = []
        tasks: set[asyncio.Task[Answer]] = set()
        num_ill = longest_queue = 0
        started = polled = time.monotonic()
        while (now := time.monotonic()) < started + (8.0 if trial.short else 60.0):
            await asyncio.sleep(trial.chance.expovariate(10 * capacity))
            answers.append(Answer(trial.requests(1, 60)[0]))
            tasks.add(task := asyncio.create_task(ask(running.client, answers[-1].asked, answers[-1])))
            task.add_done_callback(tasks.discard)
            if now > polled + 0.5:
                polled = now
                num_ill += not await is_serving(running.orchestrator.address)
                longest_queue = max(longest_queue, (await running.client.server_info()).waiting_requests)
        goodput = sum(answer.sample.finished for answer in answers) / (time.monotonic() - started)
        recovered_s = await until(lambda: _admits_at_once(trial, running), 30.0)
        await asyncio.gather(*tasks)
        _check_rejected(trial, answers)
        trial.check_same([answer for answer in answers if answer.error is None], "accepted")
        trial.at_least("goodput over capacity", goodput / capacity, 0.9)
        trial.at_most("longest queue", longest_queue, 16, "requests")
        trial.check(not num_ill, f"{num_ill} health checks failed")
        trial.at_most("recovered after", recovered_s, 5.0)
        trial.at_most("orchestrator grew", running.orchestrator.rss_mib - before_mib, 64.0, "MiB")


def _check_rejected(trial: Trial, answers: list[Answer]) -> None:
    rejected = [answer for answer in answers if answer.error is not None]
    others = {type(answer.error).__name__ for answer in rejected} - {"Overloaded"}
    trial.note(f"{len(answers)} sent, {len(rejected)} rejected")
    trial.check(not others, f"other errors: {', '.join(others) or 'none'}")
    advised = all(isinstance(a.error, Overloaded) and a.error.retry_after_s > 0 for a in rejected)
    trial.check(advised, "all rejects have a retry delay")
    times = [answer.ended - answer.started for answer in rejected]
    trial.note(f"rejects p50 {percentile(times, 0.5) * 1e3:.1f} ms, p99 {percentile(times, 0.99) * 1e3:.1f} ms")
    trial.at_most("longest reject", max(times) * 1e3, 50.0, "ms")


@asynccontextmanager
async def _no_garbage_collection() -> AsyncIterator[None]:
    """In this process: pauses of 60 ms would count as the orchestrator's."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def capacity_of(trial: Trial, client: Client, seconds: float) -> float:
    """Requests per second that end in a closed loop of 16 clients: one request waits for each live one."""
    async with trial.steady(client, 16, 60) as load:
        await asyncio.sleep(seconds)
        num_finished = sum(answer.sample.finished for answer in load.answers)
    return num_finished / seconds


async def _admits_at_once(trial: Trial, running: Deployment) -> bool:
    """Whether the queue is empty and a new request is admitted within 0.1 s."""
    if (await running.client.server_info()).waiting_requests:
        return False
    answer = await ask(running.client, trial.requests(1, 1)[0])
    return answer.error is None and answer.admitted - answer.started < 0.1


async def too_few_slots(trial: Trial) -> None:
    """32 requests need more than 8,192 KV slots of a pool with 4,096: long prompts, and outputs beyond the estimate of
    the admission."""
    async with trial.deployment(pass_ms=5.0, step_ms=0.2, target=["--kv-slots=4096"]) as running:
        asked = trial.requests(12, 200, 700) if trial.short else trial.requests(32, 200, 256)
        need = sum(len(each.prompt) + each.max_tokens for each in asked)
        max_used = 0
        async with Traffic(running.client, asked) as traffic:
            while not all(answer.done for answer in traffic.answers):
                max_used = max(max_used, (await running.loads())[0].kv_slots_used)
                await asyncio.sleep(0.05)
            answers = await traffic.finished(60.0)
        trial.note(f"{need} slots needed, at most {max_used} of 4096 used")
        trial.check_same(answers)
        trial.at_most("replays of one request", max(answer.num_replays for answer in answers), 2, "")
        trial.note(f"{num_replays(answers)} replays in total")
        trial.check(running.targets[0].returncode is None, "the target is alive")
        trial.at_most("slots freed after", await running.freed(), 2.0)


async def long_prefill(trial: Trial) -> None:
    """Three prompts of 32,000 ids arrive at once. Prefill, 512 rows a pass, takes several watchdog timeouts (1 s)."""
    length = 16_000 if trial.short else 32_000
    async with trial.deployment(num_targets=2, pass_ms=50.0, target=["--row-us=20"]) as running:
        before = sum(load.passes for load in (await running.loads())[:2])
        async with Traffic(running.client, trial.requests(3, 40, length)) as traffic:
            answers = await traffic.finished(120.0)
        num_passes = sum(load.passes for load in (await running.loads())[:2]) - before
        first = [answer.arrivals[0][0] - answer.admitted for answer in answers if answer.arrivals]
        trial.at_least("first token after", min(first, default=0.0), 1.5 if trial.short else 3.0)
        trial.check_same(answers)
        trial.check(not num_replays(answers), f"{num_replays(answers)} replays")
        # One prefill per request, in shared or separate passes, and at most 40 rounds per request.
        trial.at_most("passes", num_passes, 3 * (length // 512 + 1 + 40), "")
