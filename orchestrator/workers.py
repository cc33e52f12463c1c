"""Threads for work that grows with what a caller sent: tokenizing a prompt, reading a million ids.

Knows how much of it runs at a time, and who waits; does not know what the work is. Such work stands neither on the
event loop, where all streams would wait for it, nor in more threads than these, which would take the processor from it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

MAX_AT_A_TIME = 2


class Workers:
    """At most MAX_AT_A_TIME pieces of work at a time. Those who wait take turns, each in the order of its own pieces.

    The admission bounds how many pieces wait.
    """

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MAX_AT_A_TIME, "request")
        self._num_running = 0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # by account; the next one is first

    async def run(self, work: Callable[[], T], account: str) -> T:
        """The result of ``work``, or what it raises. ``account``: of the caller, who waits behind one piece of each
        other account, however many those have.

        A cancelled call takes back work that has not begun, and waits for work that has. A thread cannot be stopped, so
        a cancelled request keeps its place in the admission and in its key's quota as long as it costs a thread.
        """
        await self._turn(account)
        try:
            return await self._finished(asyncio.wrap_future(self._threads.submit(work)))
        finally:
            self._pass_on()

    async def _turn(self, account: str) -> None:
        if self._num_running < MAX_AT_A_TIME:
            self._num_running += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # the turn came at the same moment
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        """The place of a piece that has ended goes to the next account, which then is the last one."""
        while self._waiting:
            account = next(iter(self._waiting))
            turns = self._waiting.pop(account)
            turn = turns.popleft()
            if turns:
                self._waiting[account] = turns
            if not turn.done():
                turn.set_result(None)
                return
        self._num_running -= 1

    @staticmethod
    async def _finished(work: asyncio.Future[T]) -> T:
        try:
            return await asyncio.shield(work)
        except asyncio.CancelledError:
            while not work.done():  # a deadline cancels a call, and then its end does
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([work])
            if not work.cancelled():
                work.exception()  # it is asked for by none
            raise
