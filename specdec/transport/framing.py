"""How much goes into a frame: all there is to say, unless that is too long. Knows sizes; refuses to know meanings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

FRAME_BYTES = 1 << 20
"""A peer takes no message above specdec.transport.rpc.MAX_MESSAGE_BYTES, and a long one holds up whoever comes after
it."""


def framed(new: Callable[[], Any], entries: Iterable[tuple[str, Any]], most: int = FRAME_BYTES) -> Iterator[Any]:
    """``entries``, each a message and the repeated field that it belongs to, in as few of the frames that ``new`` makes
    as hold ``most`` bytes of them, or one entry. One frame at least."""
    frame, room = new(), most
    for field, message in entries:
        size = message.ByteSize()
        if size > room and room < most:
            yield frame
            frame, room = new(), most
        getattr(frame, field).append(message)
        room -= size
    yield frame
