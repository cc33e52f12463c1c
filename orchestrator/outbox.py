"""The events of an answer, and their queue between a request's samples and its client, which may read slowly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.rounds import RoundRecord
from orchestrator.sequence import FinishReason, Sequence
from orchestrator.statistics import Statistics
from orchestrator.text import Piece

BUFFERED_EVENTS = 32
"""Events that a client may lag behind before its samples wait."""


@dataclass(frozen=True, slots=True)
class Finish:
    """Why a sample ended, its token counts and its statistics."""

    reason: FinishReason
    matched: str | int | None  # the stop string or stop token that ended it
    num_prompt_tokens: int
    num_completion_tokens: int  # with those of what ended it
    statistics: Statistics
    num_cached: int  # prompt tokens


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A part of the prompt; ``position`` is that of its first id. ``piece.logprobs`` lack the prompt's first token."""

    position: int
    piece: Piece


@dataclass(frozen=True, slots=True)
class RoundReport:
    """One round of the sample ``index``, with ``number`` rounds before it; times outside of the target in seconds."""

    index: int
    number: int
    record: RoundRecord
    draft_wait_s: float
    path_s: float


@dataclass(frozen=True, slots=True)
class Chunk:
    """New output of the sample ``index``; ``position`` is that of its first id in the output."""

    index: int
    position: int
    piece: Piece
    finish: Finish | None = None  # with the last chunk

    @staticmethod
    def of(sequence: Sequence, *, index: int, position: int, piece: Piece) -> Chunk:
        """A chunk, with the finish of ``sequence`` if it has ended."""
        finish = None
        if sequence.finish_reason is not None:
            finish = Finish(
                reason=sequence.finish_reason,
                matched=sequence.matched,
                num_prompt_tokens=sequence.num_prompt_tokens,
                num_completion_tokens=sequence.num_committed,
                statistics=sequence.statistics,
                num_cached=sequence.num_cached or 0,
            )
        return Chunk(index=index, position=position, piece=piece, finish=finish)


Event = Chunk | PromptPart | RoundReport


class Outbox:
    """``patience_s``: how long a sample waits for its client before it is parked."""

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._events: asyncio.Queue[Event | Exception] = asyncio.Queue(BUFFERED_EVENTS)
        self._open = asyncio.Event()
        self._open.set()
        self._turn = asyncio.Lock()  # first come, first served
        self._num_waiting = 0

    async def put(self, event: Event, park: Callable[[], None]) -> None:
        """Put an event as soon as there is room. If that takes longer than the patience, ``park()`` is called first.

        After a sample was parked, no sample puts an event until the client has read the whole queue. Otherwise a client
        that reads an event now and then would cost a replay each time.
        """
        if not self._num_waiting and self._open.is_set() and not self._events.full():
            self._events.put_nowait(event)
            return
        self._num_waiting += 1
        try:
            await self._wait_and_put(event, park)
        finally:
            self._num_waiting -= 1

    async def _wait_and_put(self, event: Event, park: Callable[[], None]) -> None:
        try:
            async with asyncio.timeout(self._patience_s):
                await self._put(event)
        except TimeoutError:
            if not self._events.empty():
                self._open.clear()
            park()
            await self._put(event)

    async def _put(self, event: Event) -> None:
        async with self._turn:
            await self._open.wait()
            await self._events.put(event)

    async def fail(self, error: Exception) -> None:
        """Put the error that ends the request."""
        await self._events.put(error)

    async def get(self) -> Event:
        """The next event. Raises the error that ended the request."""
        event = await self._events.get()
        if self._events.empty():
            self._open.set()
        if isinstance(event, Exception):
            raise event
        return event
