"""Real processes that are killed, crash, are told to end, or are frozen, in mid-stream: every request ends as it must.

The real models as processes are in tests/specdec/cli/test_secrets.py, the fault table in bench/chaos.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from specdec.cli.processes import is_serving
from specdec.client import Client
from specdec.core.errors import GivenUp, ReplicaLost
from testing.lab import Deployment, Lab, Process
from testing.table_model import Table
from testing.traffic import Answer, Asked, Traffic, ask

PATIENCE_S = 120.0
"""Seconds that only a broken service takes, however busy the machine."""
GRACE = ["--shutdown-grace-s=60"]
POISON = 1000
"""A text with this token ends the process that computes it."""
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
REQUESTS = [
    asked
    for number in range(40)
    if POISON
    not in (
        asked := Asked((number, 2, 3), 200, seed=number, temperature=0.8 if number % 2 else 0.0, num_draft_tokens=1)
    ).expected(Table())
][:4]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def processes() -> AsyncIterator[Deployment]:
    target, watchful = [*GRACE, f"--crash-on-token={POISON}"], [*GRACE, "--watchdog-s=1"]
    async with Lab(1).deployment(2, pass_ms=4.0, target=target, draft=GRACE, orchestrator=watchful) as found:
        yield found


@pytest_asyncio.fixture(loop_scope="module")
async def found(processes: Deployment) -> Deployment:
    """With everything started again that ended in an earlier test."""
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


async def busiest(found: Deployment) -> Process:
    """The target with more sequences."""
    loads = [load.live_sequences for load in (await found.loads())[:2]]
    return found.targets[loads.index(max(loads))]


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


async def test_a_frozen_target_is_left_and_its_late_verdicts_do_no_harm(found: Deployment) -> None:
    async with Traffic(found.client, REQUESTS) as traffic:
        await traffic.reached(0.2)
        frozen = await busiest(found)
        frozen.freeze()
        try:
            assert all_same(await traffic.finished(PATIENCE_S))
            async with Traffic(found.client, REQUESTS) as others:
                await others.reached(0.1)
                frozen.thaw()
                assert all_same(await others.finished(PATIENCE_S))
        finally:
            frozen.thaw()
    assert await found.ready(PATIENCE_S) < PATIENCE_S
    assert await found.freed(PATIENCE_S) < PATIENCE_S


async def test_a_killed_target_and_a_killed_draft_are_done_without_and_used_again(found: Deployment) -> None:
    async with Traffic(found.client, REQUESTS) as traffic:
        await traffic.reached(0.2)
        killed = [await busiest(found), found.drafts[0]]
        for process in killed:
            await process.kill()
        answers = await traffic.finished(PATIENCE_S)
    assert all_same(answers)
    assert sum(answer.num_replays for answer in answers) > 0, "they were in the middle of it"
    for process in killed:
        await process.start()
    assert await found.ready(PATIENCE_S) < PATIENCE_S
    assert await speculates(found)


async def test_the_clients_of_a_killed_orchestrator_are_told_and_it_leaves_nothing(found: Deployment) -> None:
    async with Traffic(found.client, REQUESTS) as traffic:
        await traffic.reached(0.2)
        await found.orchestrator.kill()
        answers = await traffic.finished(PATIENCE_S)
    assert all(isinstance(answer.error, ReplicaLost) for answer in answers)
    assert all(answer.same(Table()) for answer in answers), "the tokens received before it are right"
    assert await found.freed(PATIENCE_S, open_streams=0) < PATIENCE_S


async def test_a_request_that_ends_processes_ends_after_two_of_them(found: Deployment) -> None:
    """The others are in both, and survive."""

    async def started_again() -> None:
        while True:
            for process in found.targets:
                if process.returncode is not None:
                    await process.start()
            await asyncio.sleep(0.05)

    before = sum(process.num_starts for process in found.targets)
    async with Traffic(found.client, REQUESTS) as traffic:
        await traffic.reached(0.2)
        restarts = asyncio.create_task(started_again())
        try:
            poison = await ask(found.client, Asked((1, POISON), 20, seed=1, temperature=0.0))
            answers = await traffic.finished(PATIENCE_S)
        finally:
            restarts.cancel()
    assert isinstance(poison.error, GivenUp)
    assert all_same(answers)
    ended = sum(process.returncode is not None for process in found.targets)
    assert sum(process.num_starts for process in found.targets) - before + ended == 2


async def test_a_request_under_which_two_orchestrators_died_is_not_sent_to_a_third(found: Deployment) -> None:
    """It has no id from either of them, because the targets stand still."""

    async def ends_processes(orchestrators: Sequence[Process]) -> None:
        """What a request does that no orchestrator survives."""
        for process in orchestrators:
            async with Client(process.address) as client:
                while not (await client.server_info()).live_sequences:
                    await asyncio.sleep(0.01)
            await process.kill()

    targets = ",".join(each.address for each in found.targets)
    async with Lab(1).processes() as make, AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        orchestrators = [make("orchestrator", f"--target={targets}", "--watchdog-s=600") for _ in range(3)]
        for process in orchestrators:
            await process.start()
        for process in orchestrators:
            await process.healthy()
        client = await stack.enter_async_context(Client(*(each.address for each in orchestrators)))
        for each in found.targets:
            stack.callback(each.thaw)
            each.freeze()
        fate = asyncio.create_task(ends_processes(orchestrators))
        answer = await ask(client, REQUESTS[0])
        fate.cancel()
        assert isinstance(answer.error, GivenUp)
        assert str(answer.error) == "orchestrators died 2 times under this request; it is not tried again"
        assert [each.returncode for each in orchestrators] == [-signal.SIGKILL, -signal.SIGKILL, None]
    assert await found.freed(PATIENCE_S) < PATIENCE_S


async def test_a_target_and_a_draft_told_to_end_hand_over_and_exit_with_0(found: Deployment) -> None:
    async with Traffic(found.client, REQUESTS) as traffic:
        await traffic.reached(0.2)
        ended = [await busiest(found), found.drafts[0]]
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
