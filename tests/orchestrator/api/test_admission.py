"""Who may generate now, who waits, who is sent away."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from orchestrator.api.admission import Admission
from specdec.core.errors import InvalidArgument, Overloaded
from specdec.core.sequence import Priority

INTERACTIVE, STANDARD, BATCH = Priority


async def _turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_full_queue_refuses_at_once_and_says_when_to_come_back():
    admission = Admission(max_live=2, max_waiting=1)
    async with admission.admitted(2):
        waiting = asyncio.create_task(_enter(admission, 1))
        await _turns()
        assert admission.waiting == 1
        with pytest.raises(Overloaded) as caught:
            await admission.admitted(1).__aenter__()
        assert caught.value.retry_after_s > 0
        assert not waiting.done()
    await waiting
    assert (admission.live, admission.waiting) == (0, 0)


async def test_a_large_request_is_not_overtaken_by_small_ones():
    admission = Admission(max_live=4, max_waiting=9)
    order: list[int] = []
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(admission.admitted(3))
        tasks = [asyncio.create_task(_enter(admission, count, order)) for count in (4, 1, 1)]
        await _turns()
        assert admission.waiting == 3  # one small one would fit, but the large one was first
    await asyncio.gather(*tasks)
    assert order == [4, 1, 1]


async def test_who_gives_up_waiting_leaves_nothing_behind():
    admission = Admission(max_live=1, max_waiting=9)
    async with admission.admitted(1):
        gone, stays = (asyncio.create_task(_enter(admission, 1)) for _ in range(2))
        await _turns()
        gone.cancel()
        await _turns()
        assert admission.waiting == 1
    await stays
    assert (admission.live, admission.waiting) == (0, 0)


async def test_who_gives_up_just_when_admitted_gives_the_place_on():
    admission = Admission(max_live=1, max_waiting=9)
    first = admission.admitted(1)
    await first.__aenter__()
    gone, stays = (asyncio.create_task(_enter(admission, 1)) for _ in range(2))
    await _turns()
    await first.__aexit__(None, None, None)  # ``gone`` is admitted now, and has not run yet
    gone.cancel()
    await stays
    assert (admission.live, admission.waiting) == (0, 0)


async def test_who_gives_up_in_the_moment_in_which_another_leaves_does_so_in_peace():
    admission = Admission(max_live=1, max_waiting=9)
    first = admission.admitted(1)
    await first.__aenter__()
    gone, stays = (asyncio.create_task(_enter(admission, 1)) for _ in range(2))
    await _turns()
    gone.cancel()  # has not run yet
    await first.__aexit__(None, None, None)
    with pytest.raises(asyncio.CancelledError):
        await gone
    await stays
    assert (admission.live, admission.waiting) == (0, 0)


async def test_more_than_can_ever_be_live_is_refused():
    with pytest.raises(InvalidArgument, match="at most 2 samples"):
        await Admission(max_live=2, max_waiting=9).admitted(3).__aenter__()


async def test_urgent_requests_pass_others_in_the_queue_unless_those_have_waited_for_long(monkeypatch):
    admission, order, arrivals = Admission(max_live=1, max_waiting=9), [], [0.0]
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: arrivals[-1])
    tasks = []
    async with admission.admitted(1):
        priorities = {0.0: BATCH, 10.0: STANDARD, 11.0: INTERACTIVE, 58.0: STANDARD, 61.0: INTERACTIVE}
        for arrived, priority in priorities.items():
            arrivals.append(arrived)
            tasks.append(asyncio.create_task(_enter_as(admission, priority, order)))
            await _turns()
    await asyncio.gather(*tasks)
    assert order == [INTERACTIVE, STANDARD, BATCH, INTERACTIVE, STANDARD]


async def test_batch_requests_leave_a_quarter_of_the_places_to_others():
    admission, order = Admission(max_live=8, max_waiting=9), []
    async with AsyncExitStack() as stack:
        for _ in range(6):
            await stack.enter_async_context(admission.admitted(1, BATCH))
        waiting = asyncio.create_task(_enter_as(admission, BATCH, order))
        await _turns()
        assert admission.waiting == 1
        await asyncio.gather(_enter_as(admission, STANDARD, order), _enter_as(admission, INTERACTIVE, order))
        assert sorted(order) == [INTERACTIVE, STANDARD]
    await waiting
    assert (admission.live, admission.waiting) == (0, 0)


async def test_a_batch_request_of_any_size_is_served_where_no_other_is():
    admission = Admission(max_live=4, max_waiting=9)
    async with admission.admitted(4, BATCH):
        assert admission.live == 4
    async with Admission(max_live=1, max_waiting=0).admitted(1, BATCH):
        pass


async def test_of_a_full_queue_the_last_one_gives_way_to_a_more_urgent_request():
    admission, order = Admission(max_live=1, max_waiting=2), []
    async with admission.admitted(1):
        waiting = [asyncio.create_task(_enter_as(admission, BATCH, order)) for _ in range(2)]
        await _turns()
        with pytest.raises(Overloaded):
            await admission.admitted(1, BATCH).__aenter__()
        urgent = asyncio.create_task(_enter_as(admission, INTERACTIVE, order))
        await _turns()
        assert admission.waiting == 2
        with pytest.raises(Overloaded) as caught:
            await waiting[1]
        assert caught.value.retry_after_s > 0
    await asyncio.gather(waiting[0], urgent)
    assert order == [INTERACTIVE, BATCH]
    assert (admission.live, admission.waiting) == (0, 0)


async def _enter_as(admission: Admission, priority: Priority, order: list[Priority]) -> None:
    async with admission.admitted(1, priority):
        order.append(priority)
        await asyncio.sleep(0)


async def _enter(admission: Admission, count: int, order: list[int] | None = None) -> None:
    async with admission.admitted(count):
        if order is not None:
            order.append(count)
        await asyncio.sleep(0)
