"""A client that reads slowly: who waits, who is parked, and when it goes on."""

from __future__ import annotations

import asyncio

import pytest

from orchestrator.outbox import BUFFERED_EVENTS, Outbox

LONG = 60.0


class Writer:
    """A sample that hands over number after number."""

    def __init__(self, outbox: Outbox, name: str = "") -> None:
        self.num_parked = self.num_put = 0
        self._outbox, self._name = outbox, name
        self.task = asyncio.create_task(self._write())

    async def _write(self) -> None:
        while True:
            await self._outbox.put(f"{self._name}{self.num_put}", self._park)
            self.num_put += 1

    def _park(self) -> None:
        self.num_parked += 1


async def turns(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_client_that_is_behind_stops_the_sample_and_each_chunk_it_reads_lets_one_in():
    outbox = Outbox(LONG)
    writer = Writer(outbox)
    await turns(BUFFERED_EVENTS)
    assert writer.num_put == BUFFERED_EVENTS
    for number in range(5):
        assert await outbox.get() == f"{number}"
        await turns()
        assert writer.num_put == BUFFERED_EVENTS + number + 1
    assert writer.num_parked == 0
    writer.task.cancel()


async def test_a_parked_sample_goes_on_when_all_is_read_and_not_before():
    outbox = Outbox(patience_s=0.0)
    writer = Writer(outbox)
    await turns(BUFFERED_EVENTS)
    assert (writer.num_put, writer.num_parked) == (BUFFERED_EVENTS, 1)
    for number in range(BUFFERED_EVENTS):
        assert (writer.num_put, writer.num_parked) == (BUFFERED_EVENTS, 1), "opened again for a single chunk"
        assert await outbox.get() == f"{number}"
        if number < BUFFERED_EVENTS - 1:
            await turns()
    await turns(3 * BUFFERED_EVENTS)
    assert writer.num_put == 2 * BUFFERED_EVENTS
    assert writer.num_parked == 2, "parked again once the client is as far behind again"
    writer.task.cancel()


async def test_samples_of_one_request_are_parked_and_go_on_together():
    outbox = Outbox(patience_s=0.0)
    writers = [Writer(outbox, f"{name}-") for name in "abc"]
    await turns(BUFFERED_EVENTS)
    assert [writer.num_parked for writer in writers] == [1, 1, 1]
    put = [writer.num_put for writer in writers]
    for _ in range(BUFFERED_EVENTS - 1):
        await outbox.get()
        await turns()
    assert [writer.num_put for writer in writers] == put
    for _ in range(4 * BUFFERED_EVENTS):
        await outbox.get()
        await turns()
    assert all(writer.num_put > before for writer, before in zip(writers, put, strict=True)), "one waits for ever"
    for writer in writers:
        writer.task.cancel()


async def test_an_error_comes_after_what_was_there():
    outbox = Outbox(LONG)
    await outbox.put("chunk", lambda: None)
    await outbox.fail(ValueError("the end"))
    assert await outbox.get() == "chunk"
    with pytest.raises(ValueError, match="the end"):
        await outbox.get()


@pytest.mark.parametrize("number_of_turns", range(6))
async def test_a_cancellation_that_comes_together_with_a_chunk_is_not_lost(number_of_turns: int) -> None:
    outbox = Outbox(LONG)

    async def handler() -> None:
        async with asyncio.timeout(LONG):
            while True:
                await outbox.get()

    task = asyncio.create_task(handler())
    await turns()
    await outbox.put("chunk", lambda: None)
    await turns(number_of_turns)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=10.0)
    task.cancel()
    assert done, "the request goes on although its client is gone"
