"""A draft fails, or breaks the contract on purpose: the text is what it would have been."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from draft_service.drafter import DraftSequence
from orchestrator.drafting import draft_client
from specdec.client import Client
from specdec.core.tree import Candidate, SparseDistribution
from specdec.v1 import generation_pb2
from testing.hostile_draft import ANSWERS, EJECTED, REFUSED, SILENCE, hostile_draft
from testing.misbehaving import MODELS_OWN, Misbehaving
from testing.patience import PATIENCE_S
from testing.raw import orchestrator, target
from tests.cluster import cluster, connected
from tests.faults.undisturbed import (
    BLOCK,
    COUPLED,
    LENGTH,
    TOKEN,
    assert_same,
    drafter,
    generate,
    replays,
    table,
    undisturbed,
    verifier,
)
from tests.models.scripted import RandomDrafter


def failing(every: int) -> Misbehaving:
    """One of so many passes fails."""
    made = Misbehaving(drafter())

    def instead(_: Any) -> Any:
        if made.num_passes % every == 0:
            raise RuntimeError("the device is gone")
        return MODELS_OWN

    made.instead = instead
    return made


async def test_a_draft_that_keeps_failing_is_an_empty_tree() -> None:
    draft = failing(every=9)
    async with cluster([verifier()], [draft]) as running:
        assert_same(await generate(running.client), await undisturbed())
        assert draft.num_passes > 10
        await running.settled(PATIENCE_S)


async def test_a_draft_that_always_fails_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be the text that fails it: eight in a row would end the draft for all texts."""
    monkeypatch.setattr(draft_client, "_FIRST_PAUSE_S", PATIENCE_S)
    draft = failing(every=1)
    async with cluster([verifier()], [draft]) as running:
        assert_same(await generate(running.client), await undisturbed())
        assert draft.num_passes <= 2 * 2 * 3, "of each sample two at most, and each of them once more alone"
        await running.settled(PATIENCE_S)


@pytest.mark.parametrize("method", [COUPLED, BLOCK])
async def test_a_draft_that_stops_in_mid_stream_is_done_without(method: str) -> None:
    first = Misbehaving(verifier(), closes_at=8)
    async with cluster([first], [drafter()]) as running:
        task = asyncio.create_task(generate(running.client, verification=method))
        await first.in_a_pass()
        await running.drafts[0].stop()
        first.gate.set()
        samples = await task
        assert all(sample.finish.speculation.num_drafts > 0 for sample in samples)
        if method == COUPLED:
            assert_same(samples, await undisturbed())
        assert [len(sample.token_ids) for sample in samples] == [LENGTH] * 3
        assert replays(samples) == [0, 0, 0]
        running.drafts.pop()  # it has no thread any more that would count
        await running.settled(PATIENCE_S)


async def test_a_draft_without_kv_slots_is_an_empty_tree() -> None:
    async with cluster([verifier()], [drafter(num_slots=12)]) as running:
        assert_same(await generate(running.client), await undisturbed())
        await running.settled(PATIENCE_S)


@pytest.mark.parametrize("method", [COUPLED, TOKEN])
async def test_a_text_beyond_the_drafts_context_is_done_without_it(method: str) -> None:
    async with cluster([verifier()], [drafter(context_length=20)]) as running:
        samples = await generate(running.client, verification=method)
        assert all(0 < sample.finish.speculation.num_drafts < 30 for sample in samples)
        if method == COUPLED:
            assert_same(samples, await undisturbed())
        assert [len(sample.token_ids) for sample in samples] == [LENGTH] * 3


SHORT: dict[str, Any] = dict(max_tokens=16, n=2)
PEAKED = SparseDistribution((1, 2), (1.0, 0.5))
UNTRUE = SparseDistribution((1, 2), (2.0**-24, 1.0))


def chain_from(sequence: DraftSequence, *tokens: int, probs: SparseDistribution | None = None) -> list[Candidate]:
    start = len(sequence.tree)
    return [Candidate(start - 1 + i, token, probs) for i, token in enumerate(tokens)]


HOSTILE: dict[str, tuple[bool, Callable[[DraftSequence], Sequence[Candidate]]]] = {
    # name: (whether it shows on the wire under any method; what it proposes). What shows is not used.
    "nothing": (False, lambda s: []),
    "rubbish": (False, lambda s: chain_from(s, 5)),
    "more nodes than asked": (False, lambda s: chain_from(s, *range(8), *range(8))),
    "ids out of range": (True, lambda s: chain_from(s, 8)),
    "enormous ids": (True, lambda s: chain_from(s, 2**32 - 1)),
    "twins": (True, lambda s: [Candidate(-1, 1), Candidate(-1, 1), *chain_from(s, 2, 3, 4)]),
    "NaN weights": (True, lambda s: chain_from(s, 1, 2, 1, 2, 1, probs=SparseDistribution((1, 2), (1.0, math.nan)))),
    "no weight": (True, lambda s: chain_from(s, 1, 2, 1, 2, 1, probs=SparseDistribution((3,), (1.0,)))),
    "zero weights": (True, lambda s: chain_from(s, 1, 2, 1, 2, 1, probs=SparseDistribution((1, 2), (0.0, 0.0)))),
    "unnormalised": (True, lambda s: chain_from(s, 1, 2, 1, 2, 1, probs=SparseDistribution((1, 2), (0.5, 0.5)))),
    "branching": (False, lambda s: [Candidate(*edge) for edge in ((-1, 1), (-1, 2), (-1, 3), (0, 1), (0, 2))]),
    "branching with distributions": (True, lambda s: [Candidate(-1, t, PEAKED) for t in (1, 2)] * (not s.tree)),
    "untrue distributions": (False, lambda s: chain_from(s, 1, 1, 1, 1, 1, probs=UNTRUE)),
    "parents that are not there": (False, lambda s: [Candidate(77, 1)]),
    "parents below the root": (False, lambda s: [Candidate(-5, 1)] * 5),
}


UNUSED = {"nothing", "parents that are not there", "parents below the root"}
"""The drafter's service is left with nothing that it could send."""


@pytest.mark.parametrize("method", [COUPLED, BLOCK])
@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_drafter_does_no_harm(kind: str, method: str) -> None:
    on_the_wire, nodes = HOSTILE[kind]
    refused = on_the_wire or (method != COUPLED and kind in ("branching", "untrue distributions"))
    hostile = Misbehaving(RandomDrafter(table().info))
    hostile.instead = nodes
    async with cluster([verifier()], [hostile]) as running:
        samples = await generate(running.client, verification=method, **SHORT)
        if method == COUPLED or refused or kind in UNUSED:
            assert_same(samples, await undisturbed(verification=method, **SHORT))
        assert [len(sample.token_ids) for sample in samples] == [16] * 2
        if refused:
            await assert_ejected(running.client)
        await running.settled(PATIENCE_S)


async def assert_ejected(client: Client) -> None:
    """GetServerInfo says that the draft is not used, and why, once what it sent has been read."""
    async with asyncio.timeout(PATIENCE_S):
        while (replica := (await client.server_info()).replicas[-1]).ready:
            await asyncio.sleep(0.01)
    assert replica.role == "draft"
    assert replica.problem.startswith("ejected: ")
    assert len(replica.problem) > 20


@pytest.mark.parametrize("method", [COUPLED, BLOCK])
@pytest.mark.parametrize("kind", ANSWERS)
async def test_a_hostile_draft_service_does_no_harm(kind: str, method: str) -> None:
    length = 4 if kind in (SILENCE, "no end") else 16  # the watchdog finds these two
    fields = {**SHORT, "max_tokens": length, "verification": method}
    expected = await undisturbed(**fields)
    async with (
        target(verifier()) as service,
        hostile_draft(table().info, ANSWERS[kind]) as draft,
        orchestrator([service.server.port], [int(draft.split(":")[1])], watchdog_s=0.5) as (server, client),
    ):
        await connected(server, PATIENCE_S)
        samples = await generate(client, **fields)
        assert [len(sample.token_ids) for sample in samples] == [length] * 2
        if method == COUPLED or kind in {*REFUSED, SILENCE}:
            assert [sample.token_ids for sample in samples] == expected
        if kind in EJECTED:
            await assert_ejected(client)
        [after] = await client.generate(
            token_ids={"token_ids": [1]}, max_tokens=3, num_draft_tokens=0, timeout_s=PATIENCE_S
        )
        assert after.finish.reason == generation_pb2.FINISH_REASON_LENGTH
        await service.nothing_left(open_streams=1)
