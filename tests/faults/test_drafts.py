"""A draft fails, or breaks the contract on purpose: the text is what it would have been."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from draft_service.drafter import DraftSequence, Node
from draft_service.drafters.language_model import LanguageModelDrafter
from orchestrator.api.server import OrchestratorServer
from orchestrator.drafting import draft_client
from orchestrator.settings import OrchestratorSettings
from specdec.client import Client
from specdec.core.errors import SpecdecError
from specdec.core.rounds import Load, ModelInfo
from specdec.core.tree import SparseDistribution
from specdec.transport import rpc, wire
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc, generation_pb2
from target_service.language_model import LmVerifier
from tests.cluster import cluster, connected
from tests.faults.undisturbed import (
    BLOCK,
    COUPLED,
    LENGTH,
    PATIENCE_S,
    SAMPLINGS,
    TOKEN,
    Trap,
    assert_same,
    drafter,
    fail,
    generate,
    replays,
    table,
    undisturbed,
)


class FailingDrafter(LanguageModelDrafter):
    """One of so many passes fails."""

    num_passes = 0

    def __init__(self, every: int) -> None:
        super().__init__(table(blend=(2, 0.3)))
        self._every = every

    def grow(self, sequences: Any) -> Any:
        self.num_passes += 1
        if self.num_passes % self._every == 0:
            fail()
        return super().grow(sequences)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_draft_that_keeps_failing_is_an_empty_tree(sampling: dict[str, Any]) -> None:
    expected = await undisturbed(**sampling)
    failing = FailingDrafter(every=9)
    async with cluster([LmVerifier(table())], [failing]) as running:
        assert_same(await generate(running.client, **sampling), expected)
        assert failing.num_passes > 10
        await running.settled(PATIENCE_S)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_draft_that_always_fails_is_left_alone(
    sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be the text that fails it: eight in a row would end the draft for everybody."""
    monkeypatch.setattr(draft_client, "_FIRST_PAUSE_S", PATIENCE_S)
    expected = await undisturbed(**sampling)
    failing = FailingDrafter(every=1)
    async with cluster([LmVerifier(table())], [failing]) as running:
        assert_same(await generate(running.client, **sampling), expected)
        assert failing.num_passes <= 2 * 3, "of each sample two at most"
        await running.settled(PATIENCE_S)


@pytest.mark.parametrize("method", [COUPLED, TOKEN, BLOCK])
async def test_a_draft_that_stops_in_mid_stream_is_done_without(method: str) -> None:
    expected = await undisturbed(temperature=0.8)
    first = Trap(table(), at=8)
    async with cluster([first], [drafter()]) as running:
        task = asyncio.create_task(generate(running.client, temperature=0.8, verification=method))
        await first.sprung()
        await running.drafts[0].stop()
        first.go_on.set()
        samples = await task
        assert all(sample.finish.speculation.num_drafts > 0 for sample in samples)
        if method == COUPLED:
            assert_same(samples, expected)
        assert [len(sample.token_ids) for sample in samples] == [LENGTH] * 3
        assert replays(samples) == [0, 0, 0]
        running.drafts.pop()  # it has no thread any more that would count
        await running.settled(PATIENCE_S)


@pytest.mark.parametrize("sampling", SAMPLINGS)
async def test_a_draft_without_kv_slots_is_an_empty_tree(sampling: dict[str, Any]) -> None:
    expected = await undisturbed(**sampling)
    small = LanguageModelDrafter(table(num_slots=12, blend=(2, 0.3)))
    async with cluster([LmVerifier(table())], [small]) as running:
        assert_same(await generate(running.client, **sampling), expected)
        await running.settled(PATIENCE_S)


@pytest.mark.parametrize("method", [COUPLED, TOKEN, BLOCK])
async def test_a_text_beyond_the_drafts_context_is_done_without_it(method: str) -> None:
    expected = await undisturbed(temperature=0.8)
    short = LanguageModelDrafter(table(context_length=20, blend=(2, 0.3)))
    async with cluster([LmVerifier(table())], [short]) as running:
        samples = await generate(running.client, temperature=0.8, verification=method)
        assert all(0 < sample.finish.speculation.num_drafts < 30 for sample in samples)
        if method == COUPLED:
            assert_same(samples, expected)
        assert [len(sample.token_ids) for sample in samples] == [LENGTH] * 3


PEAKED = SparseDistribution((1, 2), (1.0, 0.5))


class HostileDrafter:
    """Proposes what it is told to, whatever was asked."""

    def __init__(self, nodes: Callable[[DraftSequence], Sequence[Node]]) -> None:
        self.info: ModelInfo = dataclasses.replace(table().info, name="hostile", model_digest="hostile")
        self._nodes = nodes

    def open(self, spec: Any) -> None: ...

    def close(self, memory: None) -> None: ...

    def learn(self, sequences: Sequence[DraftSequence]) -> list[SpecdecError | bool]:
        return [True] * len(sequences)

    def grow(self, sequences: Sequence[DraftSequence]) -> list[Sequence[Node]]:
        return [self._nodes(sequence) for sequence in sequences]

    def request_yield(self, requested: bool) -> None: ...

    def cache_use(self) -> tuple[int, int]:
        return 0, 0


def chain_from(sequence: DraftSequence, *tokens: int, probs: SparseDistribution | None = None) -> list[Node]:
    start = len(sequence.tree)
    return [Node(start - 1 + i, token, probs) for i, token in enumerate(tokens)]


HOSTILE: dict[str, tuple[bool, Callable[[DraftSequence], Sequence[Node]]]] = {
    # name: (whether it shows on the wire, whatever the method; what it proposes). What shows is not used.
    "nothing": (False, lambda s: []),
    "rubbish": (False, lambda s: chain_from(s, 5)),
    "more nodes than asked": (False, lambda s: chain_from(s, *range(8), *range(8))),
    "ids out of range": (True, lambda s: chain_from(s, 8)),
    "enormous ids": (True, lambda s: chain_from(s, 2**32 - 1)),
    "twins": (True, lambda s: [Node(-1, 1), Node(-1, 1), *chain_from(s, 2, 3, 4)]),
    "NaN weights": (True, lambda s: chain_from(s, 1, 2, 1, 2, 1, probs=SparseDistribution((1, 2), (1.0, math.nan)))),
    "no weight": (True, lambda s: chain_from(s, 1, 2, 1, 2, 1, probs=SparseDistribution((3,), (1.0,)))),
    "zero weights": (True, lambda s: chain_from(s, 1, 2, 1, 2, 1, probs=SparseDistribution((1, 2), (0.0, 0.0)))),
    "unnormalised": (True, lambda s: chain_from(s, 1, 2, 1, 2, 1, probs=SparseDistribution((1, 2), (0.5, 0.5)))),
    "branching": (False, lambda s: [Node(-1, 1), Node(-1, 2), Node(-1, 3), Node(0, 1), Node(0, 2)]),
    "branching with distributions": (True, lambda s: [Node(-1, t, PEAKED) for t in (1, 2)] * (not s.tree)),
    "wrong distributions": (False, lambda s: chain_from(s, 1, 2, 1, 2, 1, probs=PEAKED)),
    "parents that are not there": (False, lambda s: [Node(77, 1)]),
    "parents below the root": (False, lambda s: [Node(-5, 1)] * 5),
}


UNUSED = {"nothing", "parents that are not there", "parents below the root"}
"""The drafter's service is left with nothing that it could send."""


@pytest.mark.parametrize("method", [COUPLED, BLOCK])
@pytest.mark.parametrize("kind", HOSTILE)
async def test_a_hostile_drafter_does_no_harm(kind: str, method: str) -> None:
    on_the_wire, nodes = HOSTILE[kind]
    refused = on_the_wire or (method != COUPLED and kind == "branching")
    expected = await undisturbed(temperature=0.8, verification=method)
    async with cluster([LmVerifier(table())], [HostileDrafter(nodes)]) as running:
        samples = await generate(running.client, temperature=0.8, verification=method)
        if method == COUPLED or refused or kind in UNUSED:
            assert_same(samples, expected)
        assert [len(sample.token_ids) for sample in samples] == [LENGTH] * 3
        if refused:
            await eject(running.client)
        await running.settled(PATIENCE_S)


async def eject(client: Client) -> None:
    """GetServerInfo says that the draft is not used, and why."""
    [replica] = [replica for replica in (await client.server_info()).replicas if replica.role == "draft"]
    assert not replica.ready
    assert replica.problem.startswith("ejected: ")
    assert len(replica.problem) > 20


class HostileDraft(draft_pb2_grpc.DraftServiceServicer):
    """A draft service of its own making: ``answers`` says what comes back for an open (advance 0) or an advance."""

    def __init__(self, answers: Callable[[int, int, int], Sequence[draft_pb2.Growth]]) -> None:
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
    answers: Callable[[int, int, int], Sequence[draft_pb2.Growth]],
) -> AsyncIterator[Client]:
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(HostileDraft(answers), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with cluster([LmVerifier(table())]) as running:
            settings = OrchestratorSettings(
                target=[f"127.0.0.1:{running.targets[0].port}"],
                draft=[f"127.0.0.1:{port}"],
                watchdog_s=0.6,
                num_draft_tokens=5,
            )
            orchestrator = OrchestratorServer(settings)
            await orchestrator.start()
            try:
                await connected(orchestrator, PATIENCE_S)
                async with Client(f"127.0.0.1:{orchestrator.port}") as client:
                    yield client
            finally:
                await orchestrator.stop()
            await running.settled(PATIENCE_S)
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
ANSWERS: dict[str, Callable[[int, int, int], Sequence[draft_pb2.Growth]]] = {
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
}


REFUSED = {"bases of the future", "bases of the prompt", "paths out of range", "enormous trees"}
REFUSED |= {"parents that are not there"}
"""However few nodes are asked for: nothing of these, or of silence, is verified."""


@pytest.mark.parametrize("method", [COUPLED, BLOCK])
@pytest.mark.parametrize("kind", ANSWERS)
async def test_a_hostile_draft_service_does_no_harm(kind: str, method: str) -> None:
    slow = kind in ("silence", "no end")  # the watchdog finds it
    length = 4 if slow else LENGTH
    fields = dict(temperature=0.8, max_tokens=length, n=2)
    expected = await undisturbed(verification=method, **fields)
    async with hostile_deployment(ANSWERS[kind]) as client:
        samples = await generate(client, verification=method, **fields)
        assert [len(sample.token_ids) for sample in samples] == [length] * 2
        if method == COUPLED or kind in REFUSED or kind == "silence":
            assert [sample.token_ids for sample in samples] == expected
        if kind in ("bases of the future", "paths out of range", "parents that are not there"):
            await eject(client)
        [after] = await client.generate(
            token_ids={"token_ids": [1]}, max_tokens=3, num_draft_tokens=0, timeout_s=PATIENCE_S
        )
        assert after.finish.reason == generation_pb2.FINISH_REASON_LENGTH
