"""Real processes that are killed, crash, are told to end, or are frozen, in mid-stream: every request ends as it must.

The real models as processes are in tests/specdec/cli/test_secrets.py, the fault table in bench/chaos.
"""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack

import pytest
import pytest_asyncio

from specdec.cli.processes import is_serving
from specdec.client import Client
from specdec.core.errors import GivenUp, ReplicaLost
from testing import process_faults
from testing.lab import Deployment, Lab, Process, start
from testing.process_faults import drafts_again
from testing.table_model import Table
from testing.traffic import Answer, Asked, Traffic, ask
from testing.trial import Trial

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
    async with Lab(1).deployment(2, pass_ms=4.0, target=target, draft=GRACE, orchestrator=watchful) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def running(processes: Deployment) -> Deployment:
    """With everything started again that ended in an earlier test."""
    await start(*(process for process in processes.processes if process.returncode is not None))
    assert await processes.ready() < PATIENCE_S
    return processes


@pytest.fixture
def trial() -> Iterator[Trial]:
    """Late is whatever a busy machine makes late; wrong must nothing be."""
    trial = Trial(seed=1)
    yield trial
    assert not trial.failures


def all_same(answers: Sequence[Answer]) -> bool:
    """All of them ended with the whole text of the target alone."""
    return all(answer.sample.finished and answer.same(Table()) for answer in answers)


async def test_a_frozen_draft_is_found_and_used_again(running: Deployment) -> None:
    [draft] = running.drafts
    async with Traffic(running.client, REQUESTS) as traffic:
        await traffic.reached(0.2)
        assert await drafts_again(running)
        draft.freeze()
        try:
            assert all_same(await traffic.finished(PATIENCE_S))
            assert await running.left(draft, PATIENCE_S) < PATIENCE_S
        finally:
            draft.thaw()
    log = running.orchestrator.log_tail(1000)
    # A keepalive ping that was just due may be as fast as the watchdog of one second.
    assert re.search(f'"address": "{draft.address}", "reason": "[^"]*(nothing was heard|ping timeout)', log), log
    assert await running.ready(PATIENCE_S) < PATIENCE_S
    assert await drafts_again(running)


async def test_a_frozen_target_is_left_and_its_late_verdicts_do_no_harm(running: Deployment, trial: Trial) -> None:
    await process_faults.freeze_target(trial, running, REQUESTS, REQUESTS)


async def test_a_killed_target_is_done_without_and_used_again(running: Deployment, trial: Trial) -> None:
    await process_faults.kill_target(trial, running, REQUESTS, 0.2)


async def test_a_killed_draft_is_done_without_and_used_again(running: Deployment, trial: Trial) -> None:
    await process_faults.kill_draft(trial, running, REQUESTS, 0.2)


async def test_the_clients_of_a_killed_orchestrator_are_told_and_it_leaves_nothing(
    running: Deployment, trial: Trial
) -> None:
    await process_faults.kill_orchestrator(trial, running, REQUESTS, 0.2)


async def test_a_request_that_ends_processes_ends_after_two_of_them(running: Deployment, trial: Trial) -> None:
    """The others are in both, and survive."""
    before = sum(process.num_starts for process in running.targets)
    poisonous = Asked((1, POISON), 20, seed=1, temperature=0.0)
    await process_faults.poison(trial, running, REQUESTS, poisonous, "a crash")
    ended = sum(process.returncode is not None for process in running.targets)
    assert sum(process.num_starts for process in running.targets) - before + ended == 2


async def test_a_request_under_which_two_orchestrators_died_is_not_sent_to_a_third(running: Deployment) -> None:
    """It has no id from either of them, because the targets stand still."""

    killed: list[Process] = []

    async def ends_processes(orchestrators: Sequence[Process]) -> None:
        """What a request does that no orchestrator survives."""
        for process in orchestrators:
            async with Client(process.address) as client:
                while not (await client.server_info()).live_sequences:
                    await asyncio.sleep(0.01)
            killed.append(process)
            await process.kill()

    targets = ",".join(each.address for each in running.targets)
    async with Lab(1).processes() as make, AsyncExitStack() as stack, asyncio.timeout(PATIENCE_S):
        orchestrators = [make("orchestrator", f"--target={targets}", "--watchdog-s=600") for _ in range(3)]
        await start(*orchestrators)
        client = await stack.enter_async_context(Client(*(each.address for each in orchestrators)))
        for each in running.targets:
            stack.callback(each.thaw)
            each.freeze()
        fate = asyncio.create_task(ends_processes(orchestrators))
        answer = await ask(client, REQUESTS[0])
        fate.cancel()
        assert isinstance(answer.error, GivenUp)
        assert str(answer.error) == "orchestrators died 2 times under this request; it is not tried again"
        assert killed == orchestrators[:2]
    assert await running.freed(PATIENCE_S) < PATIENCE_S


async def test_a_target_and_a_draft_told_to_end_hand_over_and_exit_with_0(running: Deployment) -> None:
    async with Traffic(running.client, REQUESTS) as traffic:
        await traffic.reached(0.2)
        ended = [await running.busiest_target(), running.drafts[0]]
        for process in ended:
            process.signal(signal.SIGTERM)
        answers = await traffic.finished(PATIENCE_S)
    assert all_same(answers)
    assert sum(answer.num_replays for answer in answers) > 0, "they were in the middle of it"
    for process in ended:
        assert await process.ended(PATIENCE_S) == 0, process.log_tail()
    assert not await drafts_again(running)


async def test_an_orchestrator_told_to_end_finishes_what_runs_and_exits_with_0(running: Deployment) -> None:
    async with Traffic(running.client, REQUESTS) as traffic:
        await traffic.reached(0.2)
        running.orchestrator.signal(signal.SIGTERM)
        async with asyncio.timeout(PATIENCE_S):
            while await is_serving(running.orchestrator.address):
                await asyncio.sleep(0.02)
        assert running.orchestrator.returncode is None, "it refuses while it finishes what runs"
        late = await ask(running.client, Asked((1,), 1, seed=1, temperature=0.0))
        assert isinstance(late.error, ReplicaLost)
        assert all_same(await traffic.finished(PATIENCE_S))
    assert await running.orchestrator.ended(PATIENCE_S) == 0, running.orchestrator.log_tail()


async def test_idle_services_told_to_end_exit_with_0(running: Deployment) -> None:
    for process in running.processes:
        process.signal(signal.SIGTERM)
    for process in running.processes:
        assert await process.ended(PATIENCE_S) == 0, process.log_tail()
