"""Rows 6, 8 and 10: network faults between live processes. Knows proxies and namespaces; does not know signals."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import Any

from bench.chaos.netns import Namespace
from bench.chaos.outcome import Outcome, percentile
from orchestrator.control.controller import MAX_AUTONOMOUS
from specdec.client import Client
from testing.fault_proxy import Direction
from testing.lab import Deployment, Lab, Process, load_of, until
from testing.traffic import Traffic, added_gaps, check_same, note_gaps, several

_KEEPALIVE_LIMIT_S = 10.0


async def row_06(lab: Lab, seed: int, short: bool) -> Outcome:
    """Bytes between the orchestrator and one of two targets are held, in both directions and then in each. Then all
    packets of a network namespace are dropped."""
    outcome = Outcome()
    async with lab.deployment(num_targets=2, num_drafts=1, proxied=True) as found:
        for name, directions in (
            ("both", tuple(Direction)),
            ("towards it", (Direction.UP,)),
            ("from it", (Direction.DOWN,)),
        ):

            def cut(victim: Process, hold: bool, directions: tuple[Direction, ...] = directions) -> None:
                found.proxies[victim].set(*directions, hold=hold)

            heard = Direction.DOWN not in directions
            await _partition(outcome, lab, found, found.targets, cut, f"proxy, {name}", short, heard)
    if (namespace := await Namespace.create()) is None:
        outcome.note("no network namespace available here: only the proxy was used")
        return outcome
    async with namespace, AsyncExitStack() as stack:
        make = await stack.enter_async_context(lab.processes())
        near = make("testing.table_service target", "--pass-ms=10")
        far = make("testing.table_service target", "--pass-ms=10", prefix=namespace.prefix, host=namespace.address)
        front = make("orchestrator", f"--target={near.address},{far.address}")
        for each in (near, far, front):
            await each.start()
        for each in (near, far, front):
            await each.healthy()
        client = await stack.enter_async_context(Client(front.address))
        found = Deployment([near, far], [], front, client, {})
        await found.ready()

        async def lose(victim: Process, lost: bool) -> None:
            await namespace.cut(lost)

        await _partition(outcome, lab, found, [far], lose, "namespace, packets dropped", short)
    return outcome


async def _partition(
    outcome: Outcome,
    lab: Lab,
    found: Deployment,
    candidates: list[Process],
    cut: Callable[[Process, bool], Any],
    name: str,
    short: bool,
    heard: bool = False,
) -> None:
    """Cut off one candidate under load and again when idle. ``heard``: its verdicts still reach the orchestrator."""
    async with Traffic(found.client, several(6 if short else 20, 250, lab.chance)) as traffic:
        await traffic.reached(0.2)
        # The busiest: the watchdog observes only replicas with rounds in flight; keepalive covers the others.
        live = {each: (await load_of(each.address, "target")).live_sequences for each in candidates}
        victim = max(live, key=lambda each: live[each])
        began = time.monotonic()
        await _done(cut(victim, True))
        seen_s = await found.left(victim)
        answers = await traffic.finished(60.0)
    rounds = [gap for answer in answers for gap in answer.gaps if gap < 1.0]
    # A target that is still heard decodes its sequences autonomously for a while, and their clients get tokens.
    autonomous_s = MAX_AUTONOMOUS * percentile(rounds, 0.5) if heard else 0.0
    outcome.note(f"{name}: {live[victim]} sequences on it")
    outcome.at_most(f"{name}: detected after", seen_s, autonomous_s + max(1.0, 5 * percentile(rounds, 0.99)))
    note_gaps(outcome, added_gaps(answers, began), 2.0, f"{name}: added gap")
    check_same(outcome, answers, lab.reference, name)
    await _done(cut(victim, False))
    await found.ready()
    # No rounds are in flight now, so the watchdog is off and only keepalive can detect the fault.
    await _done(cut(victim, True))
    outcome.at_most(f"{name}: idle, by keepalive", await found.left(victim), _KEEPALIVE_LIMIT_S)
    await _done(cut(victim, False))
    await found.ready()


async def _done(result: object) -> None:
    if asyncio.iscoroutine(result):
        await result


async def row_08(lab: Lab, seed: int, short: bool) -> Outcome:
    """Responses of one of two targets are delayed by 100 ms, under a steady load of 16 concurrent requests."""
    outcome = Outcome()
    window_s, settle_s = (2.0, 4.0) if short else (6.0, 10.0)
    async with lab.deployment(num_targets=2, proxied=True) as found:
        stop = asyncio.Event()
        chunks: list[tuple[float, float]] = []  # (time, gap to the previous chunk), seconds
        wrong = 0

        async def steady() -> None:
            nonlocal wrong
            while not stop.is_set():
                async with Traffic(found.client, several(1, 120, lab.chance)) as traffic:
                    [answer] = await traffic.finished(60.0)
                times = [when for when, _ in answer.arrivals]
                chunks.extend(zip(times[1:], answer.gaps, strict=True))
                wrong += not (answer.same(lab.reference) and answer.sample.finished)

        load = [asyncio.create_task(steady()) for _ in range(8 if short else 16)]
        await asyncio.sleep(window_s)
        slowed = time.monotonic()
        healthy = percentile((gap for when, gap in chunks), 0.99)
        victim = lab.chance.choice(found.targets)
        found.proxies[victim].set(Direction.DOWN, latency_s=0.1)
        ejected_s = await found.left(victim, settle_s)
        problem = (await found.replica(victim)).problem
        await asyncio.sleep(max(0.0, slowed + settle_s - time.monotonic()))
        await asyncio.sleep(window_s)
        after = percentile((gap for when, gap in chunks if when > slowed + settle_s), 0.99)
        stop.set()
        await asyncio.gather(*load)
        outcome.at_most("ejected after", ejected_s, settle_s)
        outcome.note(problem)
        outcome.check(not wrong, f"{wrong} wrong or unfinished")
        outcome.note(f"gap p99 healthy {healthy * 1e3:.1f} ms")
        outcome.at_most(f"gap p99 from {settle_s:g} s on", after * 1e3, 1.5 * healthy * 1e3, "ms")
    return outcome


async def row_10(lab: Lab, seed: int, short: bool) -> Outcome:
    """Connections to targets and draft are reset, or cut inside a frame, several times a second."""
    outcome = Outcome()
    async with lab.deployment(num_targets=2, proxied=True) as found:
        async with Traffic(found.client, several(8 if short else 40, 300, lab.chance)) as traffic:
            faults = 0
            while not all(answer.done for answer in traffic.answers) and faults < 400:
                await asyncio.sleep(lab.chance.uniform(0.05, 0.4))
                proxy = lab.chance.choice(list(found.proxies.values()))
                faults += 1
                if lab.chance.random() < 0.5:
                    proxy.reset()
                else:
                    proxy.set(lab.chance.choice(list(Direction)), truncate_after=lab.chance.randint(1, 400))
            answers = await traffic.finished(60.0)
        outcome.note(f"{faults} faults, {sum(answer.num_replays for answer in answers)} replays")
        check_same(outcome, answers, lab.reference)
        everyone = [*found.targets, *found.drafts, found.orchestrator]
        dead = [each.module for each in everyone if each.returncode is not None]
        outcome.check(not dead, f"processes that ended: {', '.join(dead) or 'none'}")
        traces = sum(each.tracebacks() for each in everyone)
        outcome.check(not traces, f"{traces} tracebacks in the logs")
        back = await until(lambda: _all_ready(found), 10.0)
        outcome.at_most("all replicas used again after", back, 5.0)
    return outcome


async def _all_ready(found: Deployment) -> bool:
    return all(each.ready for each in (await found.client.server_info()).replicas)
