"""Processes of a deployment that are killed or frozen under load, and what must hold then.

Each function breaks a deployment in which every replica is in use, records what it observed in the trial, and leaves
the deployment whole. Knows signals; does not know the network.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from specdec.core.errors import GivenUp, ReplicaLost
from specdec.v1 import generation_pb2
from testing.lab import Deployment, Process, start, until
from testing.patience import LONG_PATIENCE_S
from testing.traffic import Answer, Asked, Traffic, added_gaps, ask, interrupted, percentile
from testing.trial import Trial

_KEEPALIVE_BOUND_S = 3.5  # rpc.KEEPALIVE_MS + rpc.PING_TIMEOUT_MS, and 0.5 s for scheduling


async def kill_target(trial: Trial, running: Deployment, asked: Sequence[Asked], share: float) -> list[float]:
    """The busiest target gets SIGKILL, and is started again. The added gaps of the requests, in seconds."""
    victim = running.targets[0]

    async def kill() -> None:
        nonlocal victim
        victim = await running.busiest_target()
        await victim.kill()

    killed, answers = await interrupted(running.client, asked, share, kill)
    num_moved = sum(answer.num_replays > 0 for answer in answers)
    trial.check(num_moved > 0, f"{num_moved} moved")
    trial.check_same(answers)
    await start(victim)
    trial.at_most("the target used again after", await running.ready(LONG_PATIENCE_S), 10.0)
    return added_gaps(answers, killed, killed + 3)


async def kill_draft(trial: Trial, running: Deployment, asked: Sequence[Asked], share: float) -> None:
    """The only draft gets SIGKILL, and is started again."""
    [draft] = running.drafts
    killed, answers = await interrupted(running.client, asked, share, draft.kill)
    trial.check_same(answers)
    trial.note_gaps(added_gaps(answers, killed, killed + 2), 0.5, "stall")
    await start(draft)
    trial.at_most("draft in use again after", await until(lambda: drafts_again(running), LONG_PATIENCE_S), 5.0)


async def drafts_again(running: Deployment) -> bool:
    """Whether a new request gets tokens from the draft."""
    answer = await ask(running.client, Asked((1, 2), 30, seed=1, temperature=0.8, num_draft_tokens=5))
    return generation_pb2.TOKEN_ORIGIN_DRAFT in answer.sample.origins


async def kill_orchestrator(trial: Trial, running: Deployment, asked: Sequence[Asked], share: float) -> None:
    """The only orchestrator gets SIGKILL, and is started again. Its clients are told, and nothing of it is left."""
    freed_s = 0.0

    async def kill() -> None:
        nonlocal freed_s
        await running.orchestrator.kill()
        freed_s = await running.freed(LONG_PATIENCE_S, open_streams=0)

    killed, answers = await interrupted(running.client, asked, share, kill)
    # A client tries its only address again before, since that may be the name of several orchestrators.
    trial.at_most("clients get an error after", max(answer.ended - killed for answer in answers), 1.0)
    errors = {type(answer.error).__name__ for answer in answers}
    trial.check(errors == {ReplicaLost.__name__}, f"with {', '.join(errors)}")
    trial.check(all(answer.same(trial.reference) for answer in answers), "the tokens received before it are right")
    trial.at_most("streams and KV freed after", freed_s, _KEEPALIVE_BOUND_S)
    await start(running.orchestrator)
    await running.ready(LONG_PATIENCE_S)


async def freeze_target(
    trial: Trial, running: Deployment, asked: Sequence[Asked], later: Sequence[Asked], frozen_s: float = 0.0
) -> None:
    """The busiest target is frozen by SIGSTOP for at least ``frozen_s``, and thawed under requests of ``later``."""
    victim, left_s = running.targets[0], 0.0

    async def freeze() -> None:
        nonlocal victim, left_s
        victim = await running.busiest_target()
        victim.freeze()
        left_s = await running.left(victim, LONG_PATIENCE_S)

    async def thaw() -> None:
        victim.thaw()  # its verdicts are late now

    try:
        frozen, answers = await interrupted(running.client, asked, 0.2, freeze)
        round_p99 = percentile((gap for answer in answers for gap in answer.gaps if gap < 1.0), 0.99)
        trial.note(f"round p99 {round_p99 * 1e3:.0f} ms")
        trial.at_most("detected after", left_s, max(1.0, 5 * round_p99))
        trial.note_gaps(added_gaps(answers, frozen), 2.0)
        trial.check_same(answers)
        await asyncio.sleep(max(0.0, frozen + frozen_s - time.monotonic()))
        _, answers = await interrupted(running.client, later, 0.1, thaw)
        trial.check_same(answers, "while it thaws")
    finally:
        victim.thaw()
    trial.at_most("used again after", await running.ready(LONG_PATIENCE_S), 5.0)
    trial.at_most("its old sequences freed after", await running.freed(LONG_PATIENCE_S), 2.0)


async def poison(
    trial: Trial, running: Deployment, asked: Sequence[Asked], poisonous: Asked, what: str
) -> list[Answer]:
    """A request that fails or ends every process which computes it runs among others; processes are started again.
    The other requests survive."""
    end = Answer(poisonous)

    async def send() -> None:
        async with Traffic(running.client, [poisonous]) as traffic:
            [end.error] = [answer.error for answer in await traffic.finished(LONG_PATIENCE_S)]

    restarts = asyncio.create_task(start_again(running.targets))
    try:
        _, answers = await interrupted(running.client, asked, 0.2, send)
    finally:
        restarts.cancel()
    trial.check(isinstance(end.error, GivenUp), f"{what}: the poison ends with {end.error}")
    trial.check_same(answers, "others")
    return answers


async def start_again(processes: Sequence[Process]) -> None:
    """Starts those that have ended, until it is cancelled."""
    while True:
        for process in processes:
            if process.returncode is not None:
                await process.start()
        await asyncio.sleep(0.1)
