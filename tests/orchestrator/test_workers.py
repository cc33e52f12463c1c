"""Work of a caller's size: a few threads of it at a time, and what a cancelled request costs."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest

from orchestrator.workers import MAX_AT_A_TIME, Workers


class Work:
    """Begins in a thread, and ends when it is told to."""

    def __init__(self) -> None:
        self.begun, self.end = threading.Event(), threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.end.wait(30)
        return "done"

    async def has_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 30)


async def test_a_few_run_at_a_time_and_the_others_in_the_order_in_which_they_came() -> None:
    workers, works = Workers(), [Work() for _ in range(MAX_AT_A_TIME + 2)]
    tasks = [asyncio.create_task(workers.run(work, "a")) for work in works]
    for number, work in enumerate(works):
        await work.has_begun()
        assert not any(each.begun.is_set() for each in works[number + MAX_AT_A_TIME :])
        work.end.set()
        assert await tasks[number] == "done"


async def test_accounts_take_turns_however_much_one_of_them_sends() -> None:
    workers, blocking, order = Workers(), [Work() for _ in range(MAX_AT_A_TIME)], []
    running = [asyncio.create_task(workers.run(work, "a")) for work in blocking]
    await blocking[-1].has_begun()

    def work(name: str) -> None:
        order.append(name)

    names = [*(f"a{number}" for number in range(20)), "b0", "c0", "b1"]
    waiting = [asyncio.create_task(workers.run(partial(work, name), name[0])) for name in names]
    await asyncio.sleep(0)
    waiting[0].cancel()  # it leaves its account's place to the others
    blocking[0].end.set()  # one thread, so that the order is one of turns
    await asyncio.wait(waiting)
    blocking[1].end.set()
    await asyncio.gather(*running)
    assert order[:5] == ["b0", "c0", "a1", "b1", "a2"]
    assert order[5:] == [f"a{number}" for number in range(3, 20)]
    assert await workers.run(lambda: "next", "d") == "next"


async def test_cancelled_before_it_begins_it_never_does() -> None:
    workers, works = Workers(), [Work() for _ in range(MAX_AT_A_TIME + 1)]
    *running, waiting = [asyncio.create_task(workers.run(work, "a")) for work in works]
    await works[0].has_begun()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    for work in works:
        work.end.set()
    assert await asyncio.gather(*running) == ["done"] * MAX_AT_A_TIME
    assert not works[-1].begun.is_set()


async def test_cancelled_after_it_began_the_call_lasts_as_long_as_the_thread() -> None:
    workers, work = Workers(), Work()
    task = asyncio.create_task(workers.run(work, "a"))
    await work.has_begun()
    for _ in range(3):  # as a deadline does, and then the end of the call
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        assert not task.done()
    work.end.set()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_what_the_work_raises_reaches_the_caller() -> None:
    with pytest.raises(ZeroDivisionError):
        await Workers().run(lambda: 1 // 0, "a")
