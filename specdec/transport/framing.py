"""Packs messages into frames of limited size. Knows sizes; does not know what the messages mean."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

FRAME_BYTES = 1 << 20
"""Bytes of entries in a frame. A peer accepts no message above specdec.transport.rpc.MAX_ANSWER_BYTES, and a long
message delays the messages behind it."""


def framed(new: Callable[[], Any], entries: Iterable[tuple[str, Any]]) -> Iterator[Any]:
    """Pack ``entries``, pairs of a repeated field and a message, in order into as few frames of ``new`` as possible.
    A frame has at most FRAME_BYTES, or a single longer entry. Yields at least one frame."""
    frame, room = new(), FRAME_BYTES
    for field, message in entries:
        size = message.ByteSize()
        if size > room and room < FRAME_BYTES:
            yield frame
            frame, room = new(), FRAME_BYTES
        getattr(frame, field).append(message)
        room -= size
    yield frame
