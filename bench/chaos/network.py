"""Rows 6, 8 and 10: network faults between live processes. Knows proxies and namespaces; does not know signals."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack

from bench.chaos.netns import Namespace
from orchestrator.control.controller import MAX_AUTONOMOUS
from specdec.client import Client
from testing.fault_proxy import Direction
from testing.lab import Deployment, Process, load_of, replica_flags, start
from testing.traffic import Traffic, added_gaps, interrupted, percentile
from testing.trial import Trial, num_replays

_KEEPALIVE_LIMIT_S = 10.0
Cut = Callable[[Process, bool], Awaitable[None]]
"""Cuts a process off, or ends that."""


async def partition_target(trial: Trial) -> None:
    """Bytes between the orchestrator and one of two targets are held, in both directions and then in each. Then all
    packets of a network namespace are dropped."""
    async with trial.deployment(num_targets=2, proxied=True) as running:
        for name, directions in (
            ("both", tuple(Direction)),
            ("towards it", (Direction.UP,)),
            ("from it", (Direction.DOWN,)),
        ):

            async def hold(victim: Process, held: bool, directions: tuple[Direction, ...] = directions) -> None:
                running.proxies[victim].set(*directions, hold=held)

            await _partition(trial, running, running.targets, hold, f"proxy, {name}", Direction.DOWN not in directions)
    if (namespace := await Namespace.create()) is None:
        trial.note("no network namespace available here: only the proxy was used")
        return
    async with namespace, AsyncExitStack() as stack:
        make = await stack.enter_async_context(trial.processes())
        near = make("testing.table_service target", "--pass-ms=10")
        far = make("testing.table_service target", "--pass-ms=10", prefix=namespace.prefix, host=namespace.address)
        front = make("orchestrator", *replica_flags([near.address, far.address]))
        await start(near, far, front)
        client = await stack.enter_async_context(Client(front.address))
        running = Deployment([near, far], [], front, client, make)
        await running.ready()

        async def lose(victim: Process, lost: bool) -> None:
            await namespace.cut(lost)

        await _partition(trial, running, [far], lose, "namespace, packets dropped")


async def _partition(
    trial: Trial, running: Deployment, candidates: list[Process], cut: Cut, name: str, heard: bool = False
) -> None:
    """Cut off one candidate under load and again when idle. ``heard``: its verdicts still reach the orchestrator."""
    # The busiest: the watchdog observes only replicas with rounds in flight; keepalive covers the others.
    live: dict[Process, int] = {}
    left_s = 0.0

    async def cut_busiest() -> None:
        nonlocal left_s
        live.update({each: (await load_of(each.address, "target")).live_sequences for each in candidates})
        victim = max(live, key=live.__getitem__)
        await cut(victim, True)
        left_s = await running.left(victim)

    asked = trial.requests(6 if trial.short else 20, 250)
    began, answers = await interrupted(running.client, asked, 0.2, cut_busiest)
    victim = max(live, key=live.__getitem__)
    rounds = [gap for answer in answers for gap in answer.gaps if gap < 1.0]
    # A target that is still heard decodes its sequences autonomously for a while, and their clients get tokens.
    autonomous_s = MAX_AUTONOMOUS * percentile(rounds, 0.5) if heard else 0.0
    trial.note(f"{name}: {live[victim]} sequences on it")
    trial.at_most(f"{name}: detected after", left_s, autonomous_s + max(1.0, 5 * percentile(rounds, 0.99)))
    trial.note_gaps(added_gaps(answers, began), 2.0, f"{name}: added gap")
    trial.check_same(answers, name)
    await cut(victim, False)
    await running.ready()
    # No rounds are in flight now, so the watchdog is off and only keepalive can detect the fault.
    await cut(victim, True)
    trial.at_most(f"{name}: idle, by keepalive", await running.left(victim), _KEEPALIVE_LIMIT_S)
    await cut(victim, False)
    await running.ready()


async def slow_target(trial: Trial) -> None:
    """Responses of one of two targets are delayed by 100 ms, under a steady load of 16 concurrent requests."""
    window_s, settle_s = (2.0, 4.0) if trial.short else (6.0, 10.0)
    async with (
        trial.deployment(num_targets=2, proxied=True) as running,
        trial.steady(running.client, 8 if trial.short else 16, 120) as load,
    ):
        await asyncio.sleep(window_s)
        slowed = time.monotonic()
        victim = trial.chance.choice(running.targets)
        running.proxies[victim].set(Direction.DOWN, latency_s=0.1)
        ejected_s = await running.left(victim, settle_s)
        problem = (await running.replica(victim)).problem
        await asyncio.sleep(max(0.0, slowed + settle_s - time.monotonic()) + window_s)
    times = [[when for when, _ in answer.arrivals] for answer in load.answers]
    chunks = [(later, later - earlier) for of_one in times for earlier, later in itertools.pairwise(of_one)]
    healthy, after = (
        percentile((gap for when, gap in chunks if begin < when < end), 0.99)
        for begin, end in ((0.0, slowed), (slowed + settle_s, float("inf")))
    )
    trial.at_most("ejected after", ejected_s, settle_s)
    trial.note(problem)
    trial.check_same(load.answers)
    trial.note(f"gap p99 healthy {healthy * 1e3:.1f} ms")
    trial.at_most(f"gap p99 from {settle_s:g} s on", after * 1e3, 1.5 * healthy * 1e3, "ms")


async def reset_connections(trial: Trial) -> None:
    """Connections to targets and draft are reset, or cut inside a frame, several times a second."""
    async with trial.deployment(num_targets=2, proxied=True) as running:
        async with Traffic(running.client, trial.requests(8 if trial.short else 40, 300)) as traffic:
            num_faults = 0
            while not all(answer.done for answer in traffic.answers) and num_faults < 400:
                await asyncio.sleep(trial.chance.uniform(0.05, 0.4))
                proxy = trial.chance.choice(list(running.proxies.values()))
                num_faults += 1
                if trial.chance.random() < 0.5:
                    proxy.reset()
                else:
                    proxy.set(trial.chance.choice(list(Direction)), truncate_after=trial.chance.randint(1, 400))
            answers = await traffic.finished(60.0)
        trial.note(f"{num_faults} faults, {num_replays(answers)} replays")
        trial.check_same(answers)
        ended = [process.module for process in running.processes if process.returncode is not None]
        trial.check(not ended, f"processes that ended: {', '.join(ended) or 'none'}")
        trial.check_no_tracebacks(running.processes)
        trial.at_most("all replicas used again after", await running.ready(10.0), 5.0)
