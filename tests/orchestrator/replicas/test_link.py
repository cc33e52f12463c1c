"""What is said in one frame, and what becomes of a stream that ends."""

import asyncio
import selectors
from collections.abc import Awaitable, Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from orchestrator.replicas import lane as lane_
from orchestrator.replicas import link as link_
from orchestrator.replicas.frames import TargetFrames
from orchestrator.replicas.link import HostileReplica, Link, WatchdogFired
from orchestrator.replicas.replica import Replica, Role
from specdec.core.errors import ReplicaLost
from specdec.core.rounds import TargetOpen
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.transport.opening import target_open
from specdec.transport.rpc import MAX_MESSAGE_BYTES
from specdec.v1 import common_pb2, target_pb2
from testing.patience import PATIENCE_S


class Call:
    """A stream that takes frames at once, and ends when it is told to."""

    def __init__(self) -> None:
        self.frames: list[target_pb2.VerifyRequest] = []
        self.end: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def write(self, frame: target_pb2.VerifyRequest) -> None:
        self.frames.append(frame)
        await asyncio.sleep(0)

    def __aiter__(self) -> Any:
        return self

    async def __anext__(self) -> Any:
        await self.end

    def cancel(self) -> None: ...


def never(*_: object) -> Any:
    raise AssertionError("not called here")


class Running:
    """A link that is carried."""

    async def __aenter__(self) -> "Running":
        self.call = Call()
        self.link = Link(lambda: self.call, TargetFrames(1 << 20), 60.0, 60.0)
        self.task = asyncio.create_task(self.link.run())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    def open(self, num_ids: int) -> Any:
        lane = self.link.lane()
        spec = SequenceSpec(tuple(range(70_000, 70_000 + num_ids)), num_ids, SamplingParams(), 0, Method.COUPLED)
        lane.open(target_open(lane.sequence, TargetOpen(spec)), 1)
        return lane

    async def quiet(self) -> list[target_pb2.VerifyRequest]:
        for _ in range(500):
            await asyncio.sleep(0)
        return self.call.frames


async def test_long_opens_leave_in_frames_that_delay_nobody() -> None:
    async with Running() as running:
        for _ in range(64):
            running.open(100_000)
        frames = await running.quiet()
        assert len(frames) > 64
        assert max(frame.ByteSize() for frame in frames) < MAX_MESSAGE_BYTES / 16
        ids: dict[int, list[int]] = {}
        more: dict[int, bool] = {}
        for frame in frames:
            for each in frame.opens:
                ids.setdefault(each.sequence, []).extend(each.spec.token_ids)
                more[each.sequence] = each.more
        assert list(ids.values()) == [list(range(70_000, 170_000))] * 64
        assert not any(more.values())


async def test_opens_are_written_when_they_are_sent_not_all_in_one_turn() -> None:
    """64 samples of a long prompt open at the same moment."""
    written = 0

    def counted(messages: Iterable[Any]) -> Iterator[Any]:
        nonlocal written
        for message in messages:
            written += len(message.spec.token_ids)
            yield message

    spec = SequenceSpec(range(100_000), 100_000)
    async with Running() as running:
        for lane in [running.link.lane() for _ in range(64)]:
            lane.open(counted(target_open(lane.sequence, TargetOpen(spec))), 1)
        assert not written
        running.link._next_frame()
        assert 0 < written < 2 * link_._IDS_PER_FRAME


async def test_a_neighbours_round_does_not_wait_for_a_long_open() -> None:
    async with Running() as running:
        short, long = running.open(3), running.open(1_000_000)
        short.send(target_pb2.Round(sequence=short.sequence, number=1), 1)
        long.send(target_pb2.Round(sequence=long.sequence, number=1), 1)
        frames = await running.quiet()
        said = [(frame.rounds[0].sequence, number) for number, frame in enumerate(frames) if frame.rounds]
        assert said == [(short.sequence, 0), (long.sequence, len(frames) - 1)]
        assert not frames[-1].opens[-1].more


async def test_of_a_lane_that_is_closed_nothing_more_is_said() -> None:
    async with Running() as running:
        lane = running.open(1_000_000)
        running.link._wake.set()
        while not running.call.frames:
            await asyncio.sleep(0)
        lane.close()
        frames = await running.quiet()
        assert [list(frame.closes) for frame in frames if frame.closes] == [[lane.sequence]]
        assert sum(len(each.spec.token_ids) for frame in frames for each in frame.opens) < 200_000


@pytest.mark.parametrize(
    "code",
    [code for code in grpc.StatusCode if code not in (grpc.StatusCode.OK, grpc.StatusCode.PERMISSION_DENIED)],
)
async def test_however_the_stream_of_all_ends_each_sequence_is_replayed(code: grpc.StatusCode) -> None:
    """A proxy may end it with any status; none of them is what a client did."""
    async with Running() as running:
        lane = running.open(3)
        running.call.end.set_exception(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), grpc.aio.Metadata(), "why"))
        with pytest.raises(ReplicaLost, match="why"):
            await lane.receive()


async def test_who_refuses_this_orchestrator_is_left_alone() -> None:
    async with Running() as running:
        lane = running.open(3)
        denied = grpc.StatusCode.PERMISSION_DENIED
        running.call.end.set_exception(grpc.aio.AioRpcError(denied, grpc.aio.Metadata(), grpc.aio.Metadata(), "why"))
        with pytest.raises(HostileReplica, match="it refuses this orchestrator"):
            await lane.receive()


async def test_a_replica_that_was_ejected_before_its_stream_began_tells_its_lanes() -> None:
    """Else whoever took a lane at the very moment would wait for ever."""
    replica = Replica("127.0.0.1:1", Role("target", never, never, never))
    link = Link(Call, TargetFrames(9), 1.0, 1.0)
    lane = link.lane()
    replica.eject("it answered nonsense a moment ago")
    async with asyncio.timeout(PATIENCE_S), grpc.aio.insecure_channel(replica.address) as channel:
        await replica._carry(channel, link, lambda: None)
        with pytest.raises(ReplicaLost):
            await lane.receive()


def test_a_frame_of_opens_has_room_for_many() -> None:
    assert link_._IDS_PER_FRAME * 5 < MAX_MESSAGE_BYTES / 8


# --- silence, and a replica that stands still, by a clock that only waiting moves -----------------------------------


class _Waiting(selectors.DefaultSelector):
    """Nothing comes from outside: who would wait has waited already."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(0)


def by_clock(clock: _Waiting, monkeypatch: pytest.MonkeyPatch, carried: Callable[[], Awaitable[float]]) -> float:
    """What ``carried`` returns where nothing takes time but waiting."""
    for module in (lane_, link_):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    loop = asyncio.SelectorEventLoop(clock)
    monkeypatch.setattr(loop, "time", lambda: clock.now)

    async def run() -> float:
        return await carried()

    try:
        return loop.run_until_complete(run())
    finally:
        loop.close()


class StandingStill(Call):
    """Speaks four times a second, of a pass more until ``until_s``."""

    def __init__(self, clock: _Waiting, until_s: float) -> None:
        super().__init__()
        self._clock, self._until_s = clock, until_s

    async def __anext__(self) -> target_pb2.VerifyResponse:
        await asyncio.sleep(0.25)
        passes = round(4 * min(self._clock.now, self._until_s))
        return target_pb2.VerifyResponse(load=common_pb2.Load(passes=passes))


@pytest.mark.parametrize("until_s", [0.0, 1.25, 4.0])
@pytest.mark.parametrize(
    ("passes_s", "stuck_s"),
    [([], 0.5), ([0.05], 0.5), ([0.3], 1.5), ([0.3, 0.02], 1.485), ([0.3] + 400 * [0.02], 0.5)],
    ids=["no pass", "short passes", "a slow pass", "a slow pass before", "a slow pass long ago"],
)
def test_a_replica_stands_still_after_five_of_its_slowest_passes(
    monkeypatch: pytest.MonkeyPatch, passes_s: list[float], stuck_s: float, until_s: float
) -> None:
    clock = _Waiting()

    async def carried() -> float:
        """When the link was given up."""
        link = Link(lambda: StandingStill(clock, until_s), TargetFrames(1 << 20), 1.6, 0.5)
        for pass_s in passes_s:
            link.observe_pass(pass_s)
        waiting = asyncio.create_task(link.lane().receive())
        with pytest.raises(WatchdogFired, match="made no pass") as fired:
            await link.run()
        assert fired.value.stood_still
        await asyncio.gather(waiting, return_exceptions=True)
        return clock.now

    fired_s = by_clock(clock, monkeypatch, carried)
    assert 0.1 < fired_s - until_s - stuck_s < 0.21, "looked at every 0.1 s, and 0.1 s for the stream to say why"


class HalfCut(Call):
    """Goes on with what it was told before, and names those who wait, as it should, until the way to it is cut."""

    def __init__(self, clock: _Waiting, cut_s: float) -> None:
        super().__init__()
        self._clock, self._cut_s = clock, cut_s

    async def __anext__(self) -> target_pb2.VerifyResponse:
        await asyncio.sleep(0.25)
        passes = round(self._clock.now * 4)
        told = [entry.sequence for frame in self.frames for entry in frame.rounds]
        named = told if self._clock.now < self._cut_s else []
        return target_pb2.VerifyResponse(
            load=common_pb2.Load(passes=passes),
            progress=[target_pb2.Progress(sequence=each, passes=passes) for each in named],
            verdicts=[target_pb2.Verdict(sequence=2, round=1, base=passes, next_token=1)],
        )


@pytest.mark.parametrize("num_ids", [10, 10_000])
@pytest.mark.parametrize("cut_s", [0.0, 3.0])
def test_a_replica_that_is_heard_but_hears_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, cut_s: float, num_ids: int
) -> None:
    """But not while a long open may be on its way to it."""
    clock = _Waiting()

    async def carried() -> float:
        link = Link(lambda: HalfCut(clock, cut_s), TargetFrames(1 << 20), 1.6, 60.0)
        mine, other = link.lane(), link.lane()
        spec = common_pb2.SequenceSpec(token_ids=range(num_ids))
        other.open([target_pb2.TargetOpen(sequence=other.sequence, spec=spec)], 99)
        mine.send(target_pb2.Round(sequence=mine.sequence, number=1), 1)
        waiting = asyncio.create_task(mine.receive())
        with pytest.raises(WatchdogFired, match="does not know what it was told") as fired:
            await link.run()
        assert not fired.value.stood_still
        await asyncio.gather(waiting, return_exceptions=True)
        return clock.now

    fired_s = by_clock(clock, monkeypatch, carried)
    silent_s, long_open_s = 0.75 * 1.6, 10.0 if num_ids > 1 << 13 else 0.0
    assert 0.0 < fired_s - max(cut_s - 0.25 + silent_s, long_open_s) < 0.6
