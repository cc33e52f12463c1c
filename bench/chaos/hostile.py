"""A draft service that breaks the contract in one way at a time. It is a raw gRPC server, without the checks of our
server code. Knows frames; does not know the orchestrator's reaction.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from bench.models.table_model import Table
from specdec.transport import wire
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc

VOCAB = 1024
Tree = Callable[[random.Random, int], common_pb2.TokenTree]


def _random_chain(chance: random.Random, num_nodes: int) -> common_pb2.TokenTree:
    return common_pb2.TokenTree(token_ids=[chance.randrange(VOCAB) for _ in range(num_nodes)])


def _out_of_range(chance: random.Random, num_nodes: int) -> common_pb2.TokenTree:
    return common_pb2.TokenTree(token_ids=[VOCAB + chance.randrange(1 << 30)] * max(1, num_nodes))


def _too_many(chance: random.Random, num_nodes: int) -> common_pb2.TokenTree:
    return _random_chain(chance, 10 * num_nodes + 200)


def _bad_parents(chance: random.Random, num_nodes: int) -> common_pb2.TokenTree:
    return common_pb2.TokenTree(
        token_ids=[1, 2, 3], parents=chance.choice([[5, 0, 1], [-2, 0, 1], [-1, -1], [-1, 1, 0]])
    )


def _twins(chance: random.Random, num_nodes: int) -> common_pb2.TokenTree:
    return common_pb2.TokenTree(token_ids=[7, 7, 7], parents=[-1, -1, -1])


def _empty(chance: random.Random, num_nodes: int) -> common_pb2.TokenTree:
    return common_pb2.TokenTree()


def _nan(chance: random.Random, num_nodes: int) -> common_pb2.TokenTree:
    weights = chance.choice([float("nan"), float("inf"), -1.0, 0.0])
    tree = _random_chain(chance, max(1, num_nodes))
    for token_id in tree.token_ids:
        tree.draft_probs.add(token_ids=[token_id], weights=[weights])
    return tree


def _siblings(chance: random.Random, num_nodes: int) -> common_pb2.TokenTree:
    return common_pb2.TokenTree(token_ids=range(1000), parents=[-1] * 1000)


HARMLESS: dict[str, Tree] = {"random tokens": _random_chain, "empty": _empty}
INVALID: dict[str, Tree] = {
    "ids out of range": _out_of_range,
    "more nodes than asked": _too_many,
    "malformed parents": _bad_parents,
    "twins": _twins,
    "NaN weights": _nan,
}


FLOODS: dict[str, Tree] = {"siblings without end": _siblings, "empty growths without end": _empty}


class HostileDraft(draft_pb2_grpc.DraftServiceServicer):
    """Answers each advance with a tree made by ``mode``. With None it sends heartbeats and never answers. With
    ``endless`` it sends the answer again and again, as part of a growth that never ends."""

    def __init__(self, seed: int, endless: bool = False) -> None:
        self.mode: Tree | None = _empty
        self._endless = endless
        self.num_answers = 0
        self._chance = random.Random(seed)

    async def GetModelInfo(self, request: Any, context: Any) -> common_pb2.GetModelInfoResponse:
        info = wire.write_info(Table().info("table-draft"))
        info.instance = "hostile"
        return common_pb2.GetModelInfoResponse(model=info)

    async def Draft(self, frames: AsyncIterator[draft_pb2.DraftRequest], context: Any) -> AsyncIterator[Any]:
        answers: asyncio.Queue[draft_pb2.DraftResponse] = asyncio.Queue()
        passes = 0

        async def read() -> None:
            async for frame in frames:
                response = draft_pb2.DraftResponse()
                for advance in frame.advances:
                    if self.mode is not None:
                        self.num_answers += 1
                        response.growths.add(
                            sequence=advance.sequence,
                            advance=advance.number,
                            base=advance.base,
                            tree=self.mode(self._chance, advance.budget.max_nodes),
                            end=0 if self._endless else draft_pb2.GROWTH_END_BUDGET,
                        )
                answers.put_nowait(response)

        reader = asyncio.create_task(read())
        try:
            while not reader.done():
                passes += 1
                try:
                    response = await asyncio.wait_for(answers.get(), 0.2)
                except TimeoutError:
                    response = draft_pb2.DraftResponse()
                response.load.passes = passes
                yield response
                while self._endless and response.growths and not reader.done():
                    yield response
        finally:
            reader.cancel()


async def serve(draft: HostileDraft) -> tuple[grpc.aio.Server, int]:
    """A started server and its port."""
    server = grpc.aio.server()
    draft_pb2_grpc.add_DraftServiceServicer_to_server(draft, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    return server, port
