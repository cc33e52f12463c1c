"""The bytes of a request's body, within bounds of size, time and memory. Does not know what a body says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from gateway.errors import HttpError, unavailable
from gateway.parsing import Body, parsed

MAX_BODY_BYTES = 1 << 22
_SMALL_BODY_BYTES = 1 << 16
"""A larger body is read only from a caller with a key, and by a thread: this one takes a millisecond or two."""
_MAX_HELD_BYTES = 1 << 26
"""Of all large bodies that have not ended."""
_BODY_S = 30.0
"""Time for a body to arrive."""

T = TypeVar("T")


class Bodies:
    """``accept_unknown``: fields that are not known have no effect."""

    def __init__(self, accept_unknown: bool) -> None:
        self._accept_unknown = accept_unknown
        self._held = 0
        self._thread = ThreadPoolExecutor(1, "body")  # more would not be faster, and take more memory

    async def read(
        self,
        request: Request,
        kind: type[Body],
        translate: Callable[[Body], T],
        check_key: Callable[[], Awaitable[object]],
    ) -> tuple[Body, T]:
        """The body, and what ``translate`` makes of it. ``check_key`` raises SpecdecError for an unknown caller.

        Raises HttpError if the body is none of this kind, too large or too slow.
        """
        data = bytearray()
        held = 0
        try:
            async with asyncio.timeout(_BODY_S):
                async for part in request.stream():
                    data += part
                    if len(data) > MAX_BODY_BYTES:
                        raise HttpError(413, f"a body has at most {MAX_BODY_BYTES} bytes")
                    if len(data) <= _SMALL_BODY_BYTES:
                        continue
                    if not held:
                        await check_key()
                    self._held += len(data) - held
                    held = len(data)
                    if self._held > _MAX_HELD_BYTES:
                        raise unavailable("too many large bodies at a time")
            if not held:
                return self._read(bytes(data), kind, translate)
            reading = partial(self._read, bytes(data), kind, translate)
            return await asyncio.get_running_loop().run_in_executor(self._thread, reading)
        except TimeoutError:
            message = f"the body did not arrive within {_BODY_S:g} s"
            raise HttpError(408, message, headers={"connection": "close"}) from None
        finally:
            self._held -= held

    def _read(self, data: bytes, kind: type[Body], translate: Callable[[Body], T]) -> tuple[Body, T]:
        body = parsed(data, kind, self._accept_unknown)
        return body, translate(body)
