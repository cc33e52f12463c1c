"""How long to wait for what must happen, however busy the machine is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PATIENCE_S = 30.0
"""Seconds that only a broken service takes."""
LONG_PATIENCE_S = 120.0
"""The same of processes that share a busy machine with others."""


async def eventually(predicate: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
    """Returns once ``predicate()`` is true. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
