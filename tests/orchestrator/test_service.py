"""What a request's own life must not lose."""

from __future__ import annotations

import asyncio
import time

import pytest

from orchestrator.service import _before
from specdec.errors import DeadlineExceeded


@pytest.mark.parametrize("turns", range(6))
async def test_a_cancellation_that_comes_together_with_a_chunk_is_not_lost(turns: int) -> None:
    chunks: asyncio.Queue[int] = asyncio.Queue()

    async def handler() -> None:
        while True:
            await _before(time.monotonic() + 60, chunks.get())

    task = asyncio.create_task(handler())
    await asyncio.sleep(0.01)
    chunks.put_nowait(1)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=0.5)
    task.cancel()
    assert done, "the request goes on although its client is gone"


async def test_a_deadline_that_passes_is_said_in_its_own_status() -> None:
    with pytest.raises(DeadlineExceeded):
        await _before(time.monotonic() + 0.01, asyncio.Event().wait())
    with pytest.raises(DeadlineExceeded):
        await _before(time.monotonic() - 1, asyncio.Event().wait())
