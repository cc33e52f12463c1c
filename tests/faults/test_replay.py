"""A request loses its target: it goes on at another, and its text is what it would have been."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from specdec.core.settings import EngineSettings
from specdec.server.step_loop import Key
from target_service.language_model import LmVerifier
from target_service.server import create_server
from tests.cluster import Cluster, cluster
from tests.faults.undisturbed import (
    NUM_SAMPLES,
    PATIENCE_S,
    SAMPLINGS,
    Trap,
    assert_same,
    drafter,
    fail,
    generate,
    replays,
    table,
    undisturbed,
)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_target_that_stops_in_mid_stream_is_replaced(sampling: dict[str, Any]) -> None:
    expected = await undisturbed(**sampling)
    first, second = Trap(table(), at=8), Trap(table())
    async with cluster([first, second], [drafter()]) as running:
        task = asyncio.create_task(generate(running.client, **sampling))
        await first.sprung()
        stopping = asyncio.create_task(running.targets[0].stop())
        await not_ready(running, 0)
        first.go_on.set()
        samples = await task
        await stopping
        assert_same(samples, expected)
        assert max(replays(samples)) == 1
        running.targets.pop(0)  # it has no thread any more that would count
        await running.settled(PATIENCE_S)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_target_that_drains_in_mid_stream_is_replaced(sampling: dict[str, Any]) -> None:
    expected = await undisturbed(**sampling)
    first = Trap(table(), at=8)
    async with cluster([first, LmVerifier(table())], [drafter()]) as running:
        task = asyncio.create_task(generate(running.client, **sampling))
        await first.sprung()
        stopping = asyncio.create_task(running.targets[0].stop(PATIENCE_S))
        async with asyncio.timeout(PATIENCE_S):
            while not running.targets[0].servicer.streams._loop._inbox.qsize():  # the drain waits behind the pass
                await asyncio.sleep(0.01)
        first.go_on.set()
        assert_same(await task, expected)
        await stopping
        assert (running.targets[0].load.live_sequences, running.targets[0].load.kv_slots_used) == (0, 0)
        await running.settled(PATIENCE_S)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("num_targets", [1, 2])
async def test_a_pass_that_fails_is_replayed(sampling: dict[str, Any], num_targets: int) -> None:
    expected = await undisturbed(**sampling)
    traps = [Trap(table(), at=6, then=fail) for _ in range(num_targets)]
    for trap in traps:
        trap.go_on.set()
    async with cluster(traps, [drafter()]) as running:
        samples = await generate(running.client, **sampling)
        assert all(trap.reached.is_set() for trap in traps)
        assert_same(samples, expected)
        assert max(replays(samples)) >= 1
        await running.settled(PATIENCE_S)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_target_without_kv_slots_is_replaced_by_one_that_has_them(sampling: dict[str, Any]) -> None:
    """One of two samples comes to the small one, which has room for the beginning only."""
    expected = await undisturbed(n=2, **sampling)
    small, large = LmVerifier(table(num_slots=20)), LmVerifier(table())
    async with cluster([small, large], [drafter()]) as running:
        samples = await generate(running.client, n=2, **sampling)
        assert_same(samples, expected)
        assert max(replays(samples)) >= 1
        await running.settled(PATIENCE_S)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_preempted_sequences_wait_for_their_turn_and_end_the_same(sampling: dict[str, Any]) -> None:
    expected = await undisturbed(max_tokens=100, **sampling)
    # Room for the whole of one text, but not for the ends of two, also where they are the same.
    async with cluster([LmVerifier(table(num_slots=104))], [drafter()]) as running:
        loop = running.targets[0].servicer.streams.step_loop
        all_here, posted, opened = threading.Event(), 0, []
        open_, post = loop.engine.open, loop.open

        def count(key: Key, each: Any) -> None:
            nonlocal posted
            posted += 1
            post(key, each)
            if posted >= NUM_SAMPLES:
                all_here.set()

        def meet(key: Key, each: Any) -> None:
            assert all_here.wait(PATIENCE_S), "the others were to find the first one there"
            opened.append(each.num_preemptions)
            open_(key, each)

        loop.open, loop.engine.open = count, meet  # type: ignore[method-assign]
        # Texts that are the same share all but their ends: whether there is room for two of these is a matter of luck.
        for _ in range(40):
            all_here.clear()
            posted = 0
            samples = await generate(running.client, max_tokens=100, **sampling)
            assert [sample.token_ids for sample in samples] == expected
            await running.settled(PATIENCE_S)
            if {0, 1} <= set(opened):
                return
    pytest.fail("nobody gave way, or the target was not told who did before")


async def test_a_target_that_comes_back_is_used_again() -> None:
    """The only one goes and returns on its port; the request waits for it."""
    expected = await undisturbed(temperature=0.8)
    first = Trap(table(), at=8)
    async with cluster([first], [drafter()]) as running:
        task = asyncio.create_task(generate(running.client, temperature=0.8))
        await first.sprung()
        stopping = asyncio.create_task(running.targets[0].stop())
        await not_ready(running, 0)
        first.go_on.set()
        await stopping
        again = create_server(LmVerifier(table()), EngineSettings(port=running.targets[0].port))
        await again.start()
        try:
            assert_same(await task, expected)
        finally:
            await running.orchestrator.stop()
            await again.stop()


async def not_ready(running: Cluster, index: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while running.orchestrator.targets.replicas[index].ready:
            await asyncio.sleep(0.01)
