"""Requests over gRPC, as many at a time as a window has places."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, cast

import pytest

from bench.harness.endpoints import OverGrpc
from bench.harness.runner import Request, Window
from specdec.client import Client
from specdec.core.errors import SpecdecError
from specdec.v1.generation_pb2 import Chunk, Finish, GenerateResponse


class FakeClient:
    """Answers with the seed, token by token."""

    def __init__(self) -> None:
        self.live = 0
        self.num_live: list[int] = []

    async def stream(self, seed: int, max_tokens: int, **_: Any) -> AsyncGenerator[GenerateResponse, None]:
        if seed == 9:
            raise SpecdecError("refused")
        self.live += 1
        try:
            for position in range(max_tokens):
                await asyncio.sleep(0)
                self.num_live.append(self.live)
                finish = Finish(reason="FINISH_REASON_LENGTH") if position + 1 == max_tokens else None
                yield GenerateResponse(chunk=Chunk(token_ids=[seed], first_position=position, finish=finish))
        finally:
            self.live -= 1


async def test_a_window_has_so_many_live_requests_until_there_are_enough_tokens() -> None:
    client = FakeClient()
    ask = OverGrpc(cast(Client, client)).asks()
    run = await ask(Request([{}] * 9, 4, 0.0, 0, "", Window(2, 12)))
    assert 12 <= run.num_tokens <= 13
    assert [answer.token_ids[0] for answer in run.answers] == list(range(len(run.answers)))
    assert [len(answer.token_ids) for answer in run.whole] == [2, 4, 4]
    assert (client.live, max(client.num_live)) == (0, 2)


async def test_without_a_window_all_are_asked_at_once_and_an_error_is_raised() -> None:
    client = FakeClient()
    ask = OverGrpc(cast(Client, client)).asks()
    run = await ask(Request([{}] * 3, 4, 0.0, 0, ""))
    assert [answer.token_ids for answer in run.whole] == [[0] * 4, [1] * 4, [2] * 4]
    assert max(client.num_live) == 3
    with pytest.raises(SpecdecError):
        await ask(Request([{}] * 3, 4, 0.0, 7, ""))
    assert client.live == 0
