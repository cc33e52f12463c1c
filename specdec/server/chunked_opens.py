"""Opens that come in several chunks, until they are whole. Knows how much of them there may be; not what they mean."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdec.core.errors import InvalidArgument, Overloaded

MAX_OPEN_IDS, MAX_UNFINISHED_OPENS = 1 << 21, 1024
"""Ids of one open, over all its chunks, and of all unfinished ones of a stream; and how many may be unfinished. No
context is that long: nobody is to fill the memory."""


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
        """The whole open, if this was its last chunk.

        Raises InvalidArgument or Overloaded if it, or all together, is more than there may be; whoever asked drops it.
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
            # A copy: a part of a frame keeps all of the frame in memory.
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
        """Unknown sequences are ignored."""
        if (unfinished := self._unfinished.pop(sequence, None)) is not None:
            self._num_ids -= len(unfinished.spec.token_ids)
