"""Rows 1 to 5: processes that are killed or frozen. Knows signals; does not know the network."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

from bench.chaos.outcome import Outcome, percentile
from specdec.client import Client
from specdec.v1 import generation_pb2
from testing.lab import Deployment, Lab, Process, until
from testing.traffic import Traffic, added_gaps, ask, check_same, note_gaps, several, with_timeout

_KEEPALIVE_BOUND_S = 3.5  # rpc.KEEPALIVE_MS + rpc.PING_TIMEOUT_MS, and 0.5 s for scheduling
_HANG_S = 60.0


async def row_01(lab: Lab, seed: int, short: bool) -> Outcome:
    """One of two targets gets SIGKILL at a random round of 50 requests, three times."""
    outcome = Outcome()
    count, times = (12, 1) if short else (50, 3)
    async with lab.deployment(num_targets=2) as found:
        gaps: list[float] = []
        for _ in range(times):
            victim = lab.chance.choice(found.targets)
            async with Traffic(found.client, several(count, 200, lab.chance)) as traffic:
                await traffic.reached(lab.chance.uniform(0.1, 0.6))
                killed = time.monotonic()
                await victim.kill()
                answers = await traffic.finished(_HANG_S)
            gaps += added_gaps(answers, killed, killed + 3)
            moved = sum(answer.num_replays > 0 for answer in answers)
            outcome.check(moved > 0, f"{moved} moved")
            check_same(outcome, answers, lab.reference)
            await victim.start()
            await victim.healthy()
            await found.ready()
    note_gaps(outcome, gaps, 2.0)
    return outcome


async def row_02(lab: Lab, seed: int, short: bool) -> Outcome:
    """The only target gets SIGKILL and is started again after 5 s; half of the requests have a deadline of 3 s."""
    outcome = Outcome()
    count, away_s, deadline_s = (8, 1.5, 1.2) if short else (30, 5.0, 3.0)
    async with lab.deployment(pass_ms=20.0) as found:
        asked = several(count, 300 if short else 800, lab.chance)
        asked = [with_timeout(each, deadline_s) if i % 4 < 2 else each for i, each in enumerate(asked)]
        async with Traffic(found.client, asked) as traffic:
            await asyncio.sleep(0.7)
            await found.targets[0].kill()
            await asyncio.sleep(away_s)
            await found.targets[0].start()
            answers = await traffic.finished(_HANG_S)
        hurried = [answer for answer in answers if answer.asked.timeout_s]
        late = max((answer.ended - answer.started - deadline_s for answer in hurried), default=0.0)
        outcome.at_most("past the deadline", late, 0.5)
        reasons = {getattr(answer.error, "reason", str(answer.error)) for answer in hurried}
        good = reasons <= {"DEADLINE_EXCEEDED", "NO_REPLICA", "REPLICA_LOST"}
        outcome.check(good and all(a.same(lab.reference) for a in hurried), f"with a deadline: {', '.join(reasons)}")
        check_same(outcome, [answer for answer in answers if not answer.asked.timeout_s], lab.reference, "without")
    return outcome


async def row_03(lab: Lab, seed: int, short: bool) -> Outcome:
    """The only draft gets SIGKILL in mid-stream, and is started again."""
    outcome = Outcome()
    async with lab.deployment() as found:
        async with Traffic(found.client, several(8 if short else 30, 300, lab.chance)) as traffic:
            await traffic.reached(lab.chance.uniform(0.1, 0.4))
            killed = time.monotonic()
            await found.drafts[0].kill()
            answers = await traffic.finished(_HANG_S)
        check_same(outcome, answers, lab.reference)
        note_gaps(outcome, added_gaps(answers, killed, killed + 2), 0.5, "stall")
        await found.drafts[0].start()
        await found.drafts[0].healthy()
        outcome.at_most("draft in use again after", await _drafting(found, lab), 5.0)
    return outcome


async def _drafting(found: Deployment, lab: Lab) -> float:
    """Seconds until a new request gets tokens from the draft."""

    async def drafted() -> bool:
        answer = await ask(found.client, several(1, 24, lab.chance)[0])
        return generation_pb2.TOKEN_ORIGIN_DRAFT in answer.sample.origins

    return await until(drafted, 20.0)


async def row_04(lab: Lab, seed: int, short: bool) -> Outcome:
    """The orchestrator gets SIGKILL. Then one of two orchestrators gets it, with clients that know both."""
    outcome = Outcome()
    count = 8 if short else 30
    async with lab.deployment() as found, AsyncExitStack() as stack:
        asked = several(count, 200, lab.chance)
        async with Traffic(found.client, asked) as traffic:
            await traffic.reached(lab.chance.uniform(0.2, 0.5))
            killed = time.monotonic()
            await found.orchestrator.kill()
            freed_s = await found.freed(open_streams=0)
            answers = await traffic.finished(_HANG_S)
        told_s = percentile((answer.ended - killed for answer in answers), 1.0)
        # A client tries its only address again before, since that may be the name of several orchestrators.
        outcome.at_most("clients get an error after", told_s, 1.0)
        reasons = {getattr(answer.error, "reason", str(answer.error)) for answer in answers}
        outcome.check(reasons == {"REPLICA_LOST"}, f"with {', '.join(reasons)}")
        outcome.check(all(answer.same(lab.reference) for answer in answers), "the tokens received before it are right")
        outcome.at_most("streams and KV freed after", freed_s, _KEEPALIVE_BOUND_S)
        await found.orchestrator.start()
        await found.orchestrator.healthy()
        await found.ready()
        async with Traffic(found.client, asked) as traffic:
            check_same(outcome, await traffic.finished(_HANG_S), lab.reference, "retries")

        make = await stack.enter_async_context(lab.processes())
        second: Process = make(
            "orchestrator", f"--target={found.targets[0].address}", f"--draft={found.drafts[0].address}"
        )
        await second.start()
        await second.healthy()
        client = await stack.enter_async_context(Client(found.orchestrator.address, second.address))
        async with Traffic(client, asked) as traffic:
            await traffic.reached(lab.chance.uniform(0.2, 0.5))
            killed = time.monotonic()
            await found.orchestrator.kill()
            answers = await traffic.finished(_HANG_S)
        check_same(outcome, answers, lab.reference, "with a second orchestrator")
        note_gaps(outcome, added_gaps(answers, killed), 2.0)
    return outcome


async def row_05(lab: Lab, seed: int, short: bool) -> Outcome:
    """One of two targets is frozen by SIGSTOP for 10 s."""
    outcome = Outcome()
    frozen_s = 3.0 if short else 10.0
    async with lab.deployment(num_targets=2) as found:
        victim = lab.chance.choice(found.targets)
        async with Traffic(found.client, several(8 if short else 30, 300, lab.chance)) as traffic:
            await traffic.reached(0.2)
            frozen = time.monotonic()
            victim.freeze()
            seen_s = await found.left(victim)
            answers = await traffic.finished(_HANG_S)
        round_p99 = percentile((g for a in answers for g in a.gaps if g < 1.0), 0.99)
        outcome.note(f"round p99 {round_p99 * 1e3:.0f} ms")
        outcome.at_most("detected after", seen_s, max(1.0, 5 * round_p99))
        note_gaps(outcome, added_gaps(answers, frozen), 2.0)
        check_same(outcome, answers, lab.reference)
        await asyncio.sleep(max(0.0, frozen + frozen_s - time.monotonic()))
        async with Traffic(found.client, several(8, 200, lab.chance)) as traffic:
            await traffic.reached(0.1)
            victim.thaw()  # its verdicts are late now
            check_same(outcome, await traffic.finished(_HANG_S), lab.reference, "while it thaws")
        outcome.at_most("used again after", await found.ready(), 5.0)
        outcome.at_most("its old sequences freed after", await found.freed(), 2.0)
    return outcome
