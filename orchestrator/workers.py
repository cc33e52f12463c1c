"""Threads for work that grows with what a caller sent: tokenizing a prompt, reading a million ids.

Knows how much of it runs at a time; does not know what the work is. Such work stands neither on the event loop, where
all streams would wait for it, nor in more threads than these, which would take the processor from the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")

MOST_AT_A_TIME = 2


class Workers:
    """At most MOST_AT_A_TIME pieces of work at a time, in the order in which they came."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(MOST_AT_A_TIME, "request")

    async def run(self, work: Callable[[], T]) -> T:
        """The result of ``work``, or what it raises.

        A cancelled call takes back work that has not begun, and waits for work that has. A thread cannot be stopped, so
        a cancelled request keeps its place in the admission and in its key's quota as long as it costs a thread.
        """
        submitted = self._threads.submit(work)
        try:
            return await asyncio.wrap_future(submitted)
        except asyncio.CancelledError:
            begun = asyncio.wrap_future(submitted)
            while not begun.done():  # a deadline cancels a call, and then its end does
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([begun])
            if not begun.cancelled():
                begun.exception()  # nobody else will ask
            raise
