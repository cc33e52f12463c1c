"""A draft service that breaks the contract in one way. It is a raw gRPC server, without the checks of our server code.

Knows frames; does not know the orchestrator's reaction.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from specdec.core.rounds import Load, ModelInfo
from specdec.transport import rpc, wire
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc

Answers = Callable[[int, int, int], Iterable[draft_pb2.Growth]]
"""From sequence, advance (0: an open) and base of what was sent: what comes back."""

_HEARTBEAT_S = 0.2
_MAX_ID = 2**32 - 1
_SHARP = [common_pb2.SparseDistribution(token_ids=[1], weights=[1.0])]


def growth(sequence: int, advance: int, base: int, tokens: Sequence[int] = (), **fields: Any) -> draft_pb2.Growth:
    """The last of an advance, unless ``end`` is 0."""
    tree = common_pb2.TokenTree(
        token_ids=tokens, parents=fields.pop("parents", ()), draft_probs=fields.pop("draft_probs", ())
    )
    end = fields.pop("end", draft_pb2.GROWTH_END_BUDGET)
    return draft_pb2.Growth(sequence=sequence, advance=advance, base=base, tree=tree, end=end, **fields)


def _weights(weight: float) -> list[common_pb2.SparseDistribution]:
    return [common_pb2.SparseDistribution(token_ids=[1], weights=[weight])]


SILENCE = "silence"
ENDLESS: dict[str, Answers] = {
    "a thousand siblings without end": lambda s, a, b: itertools.repeat(
        growth(s, a, b, range(2, 1002), parents=[-1] * 1000, end=0)
    ),
    "answers without end": lambda s, a, b: itertools.repeat(growth(s, a, b, end=0)),
}
ANSWERS: dict[str, Answers] = {
    SILENCE: lambda s, a, b: [],
    "empty trees": lambda s, a, b: [growth(s, a, b)],
    "other tokens": lambda s, a, b: [growth(s, a, b, [(s * a + b + depth) % 8 for depth in range(4)])],
    "two chains": lambda s, a, b: [growth(s, a, b, [1, 2], end=0), growth(s, a, b, [2, 1])],
    "distributions for a part": lambda s, a, b: [
        growth(s, a, b, [1], draft_probs=_SHARP, end=0),
        growth(s, a, b, [2], path=[1]),
    ],
    "distributions late": lambda s, a, b: [
        growth(s, a, b, [1], end=0),
        growth(s, a, b, [1], path=[1], draft_probs=_SHARP),
    ],
    "weights that are no numbers": lambda s, a, b: [growth(s, a, b, [1], draft_probs=_weights(float("nan")))],
    "infinite weights": lambda s, a, b: [growth(s, a, b, [1], draft_probs=_weights(float("inf")))],
    "weights below zero": lambda s, a, b: [growth(s, a, b, [1], draft_probs=_weights(-1.0))],
    "no weights": lambda s, a, b: [growth(s, a, b, [1], draft_probs=_weights(0.0))],
    "bases of the future": lambda s, a, b: [growth(s, a, b + 3, [1, 2])],
    "bases of the prompt": lambda s, a, b: [growth(s, a, 1, [1, 2])],
    "paths from nowhere": lambda s, a, b: [growth(s, a, b, [1], path=[7, 7, 7, 7])],
    "paths out of range": lambda s, a, b: [growth(s, a, b, [1], path=[_MAX_ID])],
    "ids out of range": lambda s, a, b: [growth(s, a, b, [_MAX_ID])],
    "more nodes than asked": lambda s, a, b: [growth(s, a, b, [1, 2] * 120)],
    "enormous trees": lambda s, a, b: [growth(s, a, b, [1, 2] * 2000)],
    "parents that are not there": lambda s, a, b: [growth(s, a, b, [1, 2], parents=[-1, 9])],
    "parents below the root": lambda s, a, b: [growth(s, a, b, [1, 2], parents=[-2, 0])],
    "parents of themselves": lambda s, a, b: [growth(s, a, b, [1, 2, 3], parents=[-1, 1, 0])],
    "too few parents": lambda s, a, b: [growth(s, a, b, [1, 2, 3], parents=[-1, -1])],
    "twins": lambda s, a, b: [growth(s, a, b, [7, 7, 7], parents=[-1, -1, -1])],
    "other sequences": lambda s, a, b: [growth(999, a, b, [1]), growth(s, a, b, [3])],
    "answers twice": lambda s, a, b: [growth(s, a, b, [1]), growth(s, a, b, [2])],
    "unknown ends": lambda s, a, b: [growth(s, a, b, [1], end=0), growth(s, a, b, end=77), growth(s, a, b)],
    "other advances": lambda s, a, b: [growth(s, a + 5, b, [1]), growth(s, a, b)],
    "no end": lambda s, a, b: [growth(s, a, b, [1, 2], end=0)],
    **ENDLESS,
}

MALFORMED = {"bases of the future", "paths out of range", "ids out of range", "twins"} | {
    name for name in ANSWERS if "parents" in name or "weights" in name
}
EJECTED = {"more nodes than asked"} | MALFORMED | ENDLESS.keys()
"""A draft that answers so is not used any more."""

REFUSED = MALFORMED | {"bases of the prompt", "enormous trees", "more nodes than asked"}
"""Nothing of these is verified, however few nodes are asked for."""


class _HostileDraft(draft_pb2_grpc.DraftServiceServicer):
    def __init__(self, info: ModelInfo, answers: Answers, heartbeats: bool) -> None:
        self._info = info
        self._answers = answers
        self._heartbeats = heartbeats

    async def GetModelInfo(self, request: Any, context: Any) -> common_pb2.GetModelInfoResponse:
        return common_pb2.GetModelInfoResponse(model=wire.write_info(self._info), load=wire.write_load(Load()))

    async def Draft(self, frames: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> None:
        one_at_a_time = asyncio.Lock()

        async def write(**fields: Any) -> None:
            async with one_at_a_time:
                await context.write(draft_pb2.DraftResponse(**fields))

        async def beat() -> None:
            for number in itertools.count(1) if self._heartbeats else ():
                await write(load=common_pb2.Load(passes=number))
                await asyncio.sleep(_HEARTBEAT_S)

        beating = asyncio.create_task(beat())
        try:
            async for frame in frames:
                sent = [(opened.sequence, 0, len(opened.spec.token_ids)) for opened in frame.opens]
                sent += [(advance.sequence, advance.number, advance.base) for advance in frame.advances]
                for growth in itertools.chain.from_iterable(self._answers(*entry) for entry in sent):
                    await write(growths=[growth])
        finally:
            beating.cancel()


@asynccontextmanager
async def hostile_draft(info: ModelInfo, answers: Answers, heartbeats: bool = False) -> AsyncIterator[str]:
    """The address of a draft of a model like ``info``. ``heartbeats``: it says all the time that it lives."""
    server = grpc.aio.server(options=rpc.SERVER_OPTIONS)
    draft_pb2_grpc.add_DraftServiceServicer_to_server(_HostileDraft(info, answers, heartbeats), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
