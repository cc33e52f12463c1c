"""A draft fails, or breaks the contract on purpose: the text is what it would have been."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from draft_service.drafter import DraftSequence
from orchestrator.drafting import draft_client
from specdec.client import Client
from specdec.core.rounds import Load
from specdec.core.tree import Candidate, SparseDistribution
from specdec.transport import rpc, wire
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc, generation_pb2
from tests.cluster import cluster, connected
from tests.contract.raw import orchestrator, target
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
from tests.models.misbehaving import MODELS_OWN, PATIENCE_S, Misbehaving
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
    "branching": (
        False,
        lambda s: [Candidate(-1, 1), Candidate(-1, 2), Candidate(-1, 3), Candidate(0, 1), Candidate(0, 2)],
    ),
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


class HostileDraft(draft_pb2_grpc.DraftServiceServicer):
    """A draft service of its own making: ``answers`` says what comes back for an open (advance 0) or an advance."""

    def __init__(self, answers: Callable[[int, int, int], Iterable[draft_pb2.Growth]]) -> None:
        self._answers = answers

    async def GetModelInfo(self, request: Any, context: Any) -> common_pb2.GetModelInfoResponse:
        return common_pb2.GetModelInfoResponse(model=wire.write_info(table().info), load=wire.write_load(Load()))

    async def Draft(self, frames: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> Any:
        async for frame in frames:
            for opened in frame.opens:
                for growth in self._answers(opened.sequence, 0, len(opened.spec.token_ids)):
                    yield draft_pb2.DraftResponse(growths=[growth])
            for advance in frame.advances:
                for growth in self._answers(advance.sequence, advance.advance, advance.base):
                    yield draft_pb2.DraftResponse(growths=[growth])


@asynccontextmanager
async def hostile_deployment(
    answers: Callable[[int, int, int], Iterable[draft_pb2.Growth]],
) -> AsyncIterator[Client]:
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(HostileDraft(answers), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with target(verifier()) as service:
            async with orchestrator([service.server.port], [port], watchdog_s=0.5) as (server_of_clients, client):
                await connected(server_of_clients, PATIENCE_S)
                yield client
            await service.nothing_left()
    finally:
        await server.stop(0)


BUDGET = draft_pb2.GROWTH_END_BUDGET


def growth(sequence: int, advance: int, base: int, tokens: Any = (), **fields: Any) -> draft_pb2.Growth:
    tree = common_pb2.TokenTree(
        token_ids=tokens, parents=fields.pop("parents", ()), draft_probs=fields.pop("draft_probs", ())
    )
    return draft_pb2.Growth(
        sequence=sequence, advance=advance, base=base, tree=tree, **{"end": BUDGET, "path": (), **fields}
    )


SHARP = [common_pb2.SparseDistribution(token_ids=[1], weights=[1.0])]
ANSWERS: dict[str, Callable[[int, int, int], Iterable[draft_pb2.Growth]]] = {
    "two chains": lambda s, a, b: [growth(s, a, b, [1, 2], end=0), growth(s, a, b, [2, 1])],
    "distributions for a part": lambda s, a, b: [
        growth(s, a, b, [1], draft_probs=SHARP, end=0),
        growth(s, a, b, [2], path=[1]),
    ],
    "distributions late": lambda s, a, b: [
        growth(s, a, b, [1], end=0),
        growth(s, a, b, [1], path=[1], draft_probs=SHARP),
    ],
    "bases of the future": lambda s, a, b: [growth(s, a, b + 3, [1, 2])],
    "bases of the prompt": lambda s, a, b: [growth(s, a, 1, [1, 2])],
    "paths from nowhere": lambda s, a, b: [growth(s, a, b, [1], path=[7, 7, 7, 7])],
    "paths out of range": lambda s, a, b: [growth(s, a, b, [1], path=[99])],
    "enormous trees": lambda s, a, b: [growth(s, a, b, [1, 2] * 2000)],
    "parents that are not there": lambda s, a, b: [growth(s, a, b, [1, 2], parents=[-1, 9])],
    "other sequences": lambda s, a, b: [growth(999, a, b, [1]), growth(s, a, b, [3])],
    "answers twice": lambda s, a, b: [growth(s, a, b, [1]), growth(s, a, b, [2])],
    "unknown ends": lambda s, a, b: [growth(s, a, b, [1], end=0), growth(s, a, b, end=77), growth(s, a, b)],
    "other advances": lambda s, a, b: [growth(s, a + 5, b, [1]), growth(s, a, b)],
    "silence": lambda s, a, b: [],
    "no end": lambda s, a, b: [growth(s, a, b, [1, 2], end=0)],
    "a thousand siblings without end": lambda s, a, b: itertools.repeat(
        growth(s, a, b, range(2, 1002), parents=[-1] * 1000, end=0)
    ),
    "answers without end": lambda s, a, b: itertools.repeat(growth(s, a, b, end=0)),
}


REFUSED = {"bases of the future", "bases of the prompt", "paths out of range", "enormous trees"}
REFUSED |= {"parents that are not there"}
"""Nothing of these, or of silence, is verified, however few nodes are asked for."""

EJECTED = {"bases of the future", "paths out of range", "parents that are not there", "answers without end"}
EJECTED |= {"a thousand siblings without end"}


@pytest.mark.parametrize("method", [COUPLED, BLOCK])
@pytest.mark.parametrize("kind", ANSWERS)
async def test_a_hostile_draft_service_does_no_harm(kind: str, method: str) -> None:
    length = 4 if kind in ("silence", "no end") else 16  # the watchdog finds these two
    fields = {**SHORT, "max_tokens": length, "verification": method}
    expected = await undisturbed(**fields)
    async with hostile_deployment(ANSWERS[kind]) as client:
        samples = await generate(client, **fields)
        assert [len(sample.token_ids) for sample in samples] == [length] * 2
        if method == COUPLED or kind in REFUSED or kind == "silence":
            assert [sample.token_ids for sample in samples] == expected
        if kind in EJECTED:
            await assert_ejected(client)
        [after] = await client.generate(
            token_ids={"token_ids": [1]}, max_tokens=3, num_draft_tokens=0, timeout_s=PATIENCE_S
        )
        assert after.finish.reason == generation_pb2.FINISH_REASON_LENGTH
