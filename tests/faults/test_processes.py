"""Real processes that are told to end, or frozen, in mid-stream: every request ends, with its own text.

Those that are killed are rows of the fault table (test_chaos_short.py), the real models as processes are in
tests/specdec/cli/test_secrets.py.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Sequence

import pytest
import pytest_asyncio

from bench.chaos.lab import Deployment, Lab
from bench.chaos.traffic import Answer, Asked, Traffic, ask
from bench.models.table_model import Table
from specdec.cli.processes import is_serving
from specdec.core.errors import ReplicaLost

PATIENCE_S = 120.0
"""Only a broken service takes that long, however busy the machine."""
GRACE = ["--shutdown-grace-s=60"]
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
REQUESTS = [
    Asked((number, 2, 3), 200, seed=5 + number, temperature=0.8 if number % 2 else 0.0, num_draft_tokens=1)
    for number in range(4)
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes() -> AsyncIterator[Deployment]:
    async with Lab(1).deployment(2, target=GRACE, draft=GRACE, orchestrator=[*GRACE, "--watchdog-s=1"]) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def found(processes: Deployment) -> Deployment:
    """What the tests before have ended is started again."""
    everything = [*processes.targets, *processes.drafts, processes.orchestrator]
    for process in everything:
        if process.returncode is not None:
            await process.start()
    for process in everything:
        await process.healthy()
    assert await processes.ready() < PATIENCE_S
    return processes


def all_same(answers: Sequence[Answer]) -> bool:
    """All of them ended with the whole text of the target alone."""
    return all(answer.sample.finished and answer.same(Table()) for answer in answers)


async def speculates(found: Deployment) -> bool:
    answer = await ask(found.client, Asked((1, 2), 30, seed=1, temperature=0.8, num_draft_tokens=5))
    return answer.sample.finish.speculation.num_drafts > 0


async def test_a_frozen_draft_is_found_and_used_again(found: Deployment) -> None:
    [draft] = found.drafts
    async with Traffic(found.client, REQUESTS) as traffic:
        await traffic.reached(0.2)
        assert await speculates(found)
        draft.freeze()
        try:
            assert all_same(await traffic.finished(PATIENCE_S))
            assert await found.left(draft, PATIENCE_S) < PATIENCE_S
        finally:
            draft.thaw()
    log = found.orchestrator.log_tail(1000)
    # A keepalive ping that was just due may be as fast as the watchdog of one second.
    assert re.search(f'"address": "{draft.address}", "reason": "[^"]*(nothing was heard|ping timeout)', log), log
    assert await found.ready(PATIENCE_S) < PATIENCE_S
    assert await speculates(found)


async def test_a_target_and_a_draft_told_to_end_hand_over_and_exit_with_0(found: Deployment) -> None:
    async with Traffic(found.client, REQUESTS) as traffic:
        await traffic.reached(0.2)
        loads = [load.live_sequences for load in (await found.loads())[:2]]
        ended = [found.targets[loads.index(max(loads))], found.drafts[0]]
        for process in ended:
            process.signal(signal.SIGTERM)
        answers = await traffic.finished(PATIENCE_S)
    assert all_same(answers)
    assert sum(answer.num_replays for answer in answers) > 0, "they were in the middle of it"
    for process in ended:
        assert await process.ended(PATIENCE_S) == 0, process.log_tail()
    assert not await speculates(found)


async def test_an_orchestrator_told_to_end_finishes_what_runs_and_exits_with_0(found: Deployment) -> None:
    async with Traffic(found.client, REQUESTS) as traffic:
        await traffic.reached(0.2)
        found.orchestrator.signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while await is_serving(found.orchestrator.address):
                await asyncio.sleep(0.02)
        assert found.orchestrator.returncode is None, "it refuses while it finishes what runs"
        late = await ask(found.client, Asked((1,), 1, seed=1, temperature=0.0))
        assert isinstance(late.error, ReplicaLost)
        assert all_same(await traffic.finished(PATIENCE_S))
    assert await found.orchestrator.ended(PATIENCE_S) == 0, found.orchestrator.log_tail()


async def test_idle_services_told_to_end_exit_with_0(found: Deployment) -> None:
    services = [*found.targets, *found.drafts, found.orchestrator]
    for process in services:
        process.signal(signal.SIGTERM)
    for process in services:
        assert await process.ended(PATIENCE_S) == 0, process.log_tail()
