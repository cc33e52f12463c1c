"""Joins opens that arrive in several chunks. Knows the limits on their size and number; does not know their meaning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdec.core.errors import InvalidArgument, Overloaded

MAX_OPEN_IDS, MAX_UNFINISHED_OPENS = 1 << 21, 1024
"""MAX_OPEN_IDS limits the ids of one open over all its chunks, and those of all unfinished opens of a stream. Contexts
are shorter; the limits keep a caller from filling the memory."""


class ChunkedOpens:
    """The unfinished opens of one stream, by sequence. Messages have ``sequence``, ``spec`` and ``more``."""

    def __init__(self) -> None:
        self._unfinished: dict[int, Any] = {}
        self._num_ids = 0  # of all of them

    def __contains__(self, sequence: int) -> bool:
        return sequence in self._unfinished

    def __iter__(self) -> Iterator[int]:
        return iter(self._unfinished)

    def add(self, message: Any) -> Any | None:
        """Add a chunk; returns the whole open after its last chunk, else None.

        Raises InvalidArgument or Overloaded above the limits, after which the caller has to ``drop`` the sequence.
        """
        sequence: int = message.sequence
        unfinished = self._unfinished.get(sequence)
        num_ids = len(message.spec.token_ids)
        length = num_ids if unfinished is None else num_ids + len(unfinished.spec.token_ids)
        if length > MAX_OPEN_IDS:
            raise InvalidArgument([("spec.token_ids", f"at most {MAX_OPEN_IDS}, not {length}")])
        if message.more and unfinished is None and len(self._unfinished) >= MAX_UNFINISHED_OPENS:
            raise Overloaded(f"{len(self._unfinished)} opens of this stream are unfinished")
        if message.more and self._num_ids + num_ids > MAX_OPEN_IDS:
            raise Overloaded(f"the unfinished opens of this stream have more than {MAX_OPEN_IDS} ids")
        if unfinished is None:
            if not message.more:
                return message
            # A copy, because a reference to a part of a frame keeps the whole frame in memory.
            unfinished = self._unfinished[sequence] = type(message)()
            unfinished.CopyFrom(message)
        else:
            unfinished.spec.token_ids.extend(message.spec.token_ids)
        self._num_ids += num_ids
        if message.more:
            return None
        self.drop(sequence)
        return unfinished

    def drop(self, sequence: int) -> None:
        """Forget an unfinished open. Unknown sequences are ignored."""
        if (unfinished := self._unfinished.pop(sequence, None)) is not None:
            self._num_ids -= len(unfinished.spec.token_ids)
