"""Clients that send one request after another while something happens to the pods. Knows answers; not pods."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

from specdec.client import Client
from testing.traffic import Answer, Asked, ask


class Load:
    """``async with`` runs ``count`` clients, each with a connection of its own, and lets their requests finish.

    A client has one address and does not retry: a failure counts.
    """

    def __init__(
        self, connect: Callable[[], Client], count: int, right: Callable[[Answer], bool], choices: Sequence[Asked] = ()
    ) -> None:
        """Requests are taken from ``choices``, or made up."""
        self.answers: list[Answer] = []
        self._count = count
        self._right = right
        self._choices = choices
        self._connect = connect
        self._stopping = False

    async def __aenter__(self) -> Load:
        self._tasks = [asyncio.create_task(self._client(number)) for number in range(self._count)]
        return self

    async def __aexit__(self, kind: type | None, *_: Any) -> None:
        self._stopping = True
        for task in self._tasks if kind else ():
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=kind is not None)

    @property
    def failures(self) -> list[str]:
        """What went wrong, in words."""
        return [
            f"{answer.asked.max_tokens} tokens: {answer.error or 'another text'}"
            for answer in self.answers
            if answer.error is not None or not answer.sample.finished or not self._right(answer)
        ]

    async def _client(self, number: int) -> None:
        chance = random.Random(number)
        async with self._connect() as client:
            while not self._stopping:
                self.answers.append(await ask(client, chance.choice(self._choices or [_made_up(chance)])))


def _made_up(chance: random.Random) -> Asked:
    prompt = tuple(chance.randrange(1024) for _ in range(6))
    return Asked(prompt, chance.choice((10, 60, 250)), chance.getrandbits(60), chance.choice((0.0, 0.8)), 60.0)
