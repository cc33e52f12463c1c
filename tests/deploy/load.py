"""Clients that send one request after another while something happens to the pods. Knows answers; not pods."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any

from specdec.client import Client
from testing.traffic import Answer, Asked, Steady


class Load:
    """``async with`` runs ``count`` clients, each with a connection of its own, and lets their requests finish.

    A client has one address and does not retry: a failure counts.
    """

    def __init__(
        self, connect: Callable[[], Client], count: int, right: Callable[[Answer], bool], choices: Sequence[Asked] = ()
    ) -> None:
        """Requests are taken from ``choices``, or made up."""
        chance = random.Random(count)
        self._right = right
        self._clients = [connect() for _ in range(count)]
        self._steady = Steady(self._clients, lambda: [chance.choice(choices or [_made_up(chance)])])
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Load:
        for client in self._clients:
            await self._stack.enter_async_context(client)
        await self._stack.enter_async_context(self._steady)
        return self

    async def __aexit__(self, *raised: Any) -> None:
        await self._stack.__aexit__(*raised)

    @property
    def answers(self) -> list[Answer]:
        """Of the requests that have ended."""
        return [answer for answer in self._steady.answers if answer.done]

    @property
    def failures(self) -> list[str]:
        """What went wrong, in words."""
        return [
            f"{answer.asked.max_tokens} tokens: {answer.error or 'another text'}"
            for answer in self.answers
            if answer.error is not None or not answer.sample.finished or not self._right(answer)
        ]


def _made_up(chance: random.Random) -> Asked:
    prompt = tuple(chance.randrange(1024) for _ in range(6))
    return Asked(prompt, chance.choice((10, 60, 250)), chance.getrandbits(60), chance.choice((0.0, 0.8)), 60.0)
