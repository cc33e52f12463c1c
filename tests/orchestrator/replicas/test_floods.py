"""A replica that sends more than it was asked for is ejected, and takes no more of the event loop than its share."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from orchestrator.replicas import link as link_
from orchestrator.replicas.allowances import MESSAGE, SPARE, Leftover
from orchestrator.replicas.frames import DraftFrames, TargetFrames
from orchestrator.replicas.lane import Lane
from orchestrator.replicas.link import HostileReplica, Link
from specdec.v1 import common_pb2, draft_pb2, target_pb2

SIBLINGS = common_pb2.TokenTree(token_ids=range(1000), parents=[-1] * 1000)
ALLOWED = 50

Response = draft_pb2.DraftResponse | target_pb2.VerifyResponse


class Flood:
    """A stream that always has a further frame."""

    def __init__(self, frames: Iterator[Response]) -> None:
        self._frames = frames
        self.num_frames = 0

    async def write(self, frame: Any) -> None: ...

    def cancel(self) -> None: ...

    def __aiter__(self) -> Flood:
        return self

    async def __anext__(self) -> Response:
        await asyncio.sleep(0)
        self.num_frames += 1
        return next(self._frames)


def growths(sequence: int, **fields: Any) -> draft_pb2.DraftResponse:
    return draft_pb2.DraftResponse(growths=[draft_pb2.Growth(sequence=sequence, base=2, **fields)])


def of_draft(sequence: int) -> dict[str, Callable[[], Iterator[Response]]]:
    one_id = [common_pb2.SparseDistribution(token_ids=range(1000), weights=[1.0] * 1000)]
    errors = [common_pb2.SequenceError(sequence=sequence)]
    return {
        "trees of siblings": lambda: itertools.repeat(growths(sequence, tree=SIBLINGS)),
        "empty growths": lambda: itertools.repeat(growths(sequence)),
        "long paths": lambda: itertools.repeat(growths(sequence, path=range(1000))),
        "unwanted distributions": lambda: itertools.repeat(
            growths(sequence, tree=common_pb2.TokenTree(token_ids=[1], draft_probs=one_id))
        ),
        "parents alone": lambda: itertools.repeat(growths(sequence, tree=common_pb2.TokenTree(parents=range(1000)))),
        "errors": lambda: itertools.repeat(draft_pb2.DraftResponse(errors=errors)),
        "frames of nothing": lambda: itertools.repeat(draft_pb2.DraftResponse()),
        "one large frame": lambda: itertools.repeat(
            draft_pb2.DraftResponse(growths=[draft_pb2.Growth(sequence=sequence)] * 100_000)
        ),
    }


def of_target(sequence: int) -> dict[str, Callable[[], Iterator[Response]]]:
    verdict = target_pb2.Verdict(sequence=sequence, round=1, base=2, next_token=1)
    many = target_pb2.Verdict(sequence=sequence, accepted=range(1000))
    beat = target_pb2.Progress(sequence=sequence)
    return {
        "verdicts": lambda: itertools.repeat(target_pb2.VerifyResponse(verdicts=[verdict])),
        "accepted nodes": lambda: itertools.repeat(target_pb2.VerifyResponse(verdicts=[many])),
        "heartbeats": lambda: itertools.repeat(target_pb2.VerifyResponse(progress=[beat])),
        "one frame of heartbeats": lambda: itertools.repeat(target_pb2.VerifyResponse(progress=[beat] * 100_000)),
    }


def taken(link: Link, lanes: list[Lane]) -> int:
    """Entries that have arrived at these lanes."""
    return sum(SPARE + ALLOWED - lane.allowance for lane in lanes)


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("kind", [*of_draft(1), *of_target(1)])
async def test_a_flood_ends_its_stream_after_what_was_allowed(kind: str, closed: bool) -> None:
    floods = of_draft(1) | of_target(1)
    flood = Flood(floods[kind]())
    link = Link(lambda: flood, DraftFrames(2000) if kind in of_draft(1) else TargetFrames(2000), 60.0, 60.0)
    lane = link.lane()
    lane.open([], ALLOWED)
    if closed:
        lane.close()
    with pytest.raises(HostileReplica):
        await link.run()
    # Frames without entries are paid by time.
    assert flood.num_frames <= (1100 if "nothing" in kind or kind == "heartbeats" else (SPARE + ALLOWED) // MESSAGE + 1)
    assert len(lane._inbox) <= (SPARE + ALLOWED) // MESSAGE + 1, "and the error that ended the stream"


async def test_entries_for_sequences_that_were_never_opened_end_the_stream() -> None:
    flood = Flood(itertools.repeat(growths(7, tree=SIBLINGS)))
    link = Link(lambda: flood, DraftFrames(2000), 60.0, 60.0)
    link.lane().open([], ALLOWED)
    with pytest.raises(HostileReplica, match="more than it was asked for"):
        await link.run()
    assert flood.num_frames == 1


async def test_a_frame_for_many_sequences_is_taken_in_parts_between_which_others_run() -> None:
    """40 lanes get a tree of 1,000 nodes in one frame."""
    link = Link(lambda: flood, DraftFrames(2000), 60.0, 60.0)
    lanes = [link.lane() for _ in range(40)]
    for lane in lanes:
        lane.open([], ALLOWED)
    frame = draft_pb2.DraftResponse(
        growths=[draft_pb2.Growth(sequence=lane.sequence, base=2, tree=SIBLINGS) for lane in lanes]
    )
    flood = Flood(iter([frame]))
    running = asyncio.create_task(link.run())
    most = before = 0
    while before < 40 * (MESSAGE + 1000):
        await asyncio.sleep(0)
        now = taken(link, lanes)
        most, before = max(most, now - before), now
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert most <= link_._ENTRIES_PER_TURN + MESSAGE + 1000


async def test_what_was_allowed_is_no_flood_however_much_it_is() -> None:
    link = Link(lambda: flood, DraftFrames(2000), 60.0, 60.0)
    lane = link.lane()
    lane.open([], 300 * (MESSAGE + 1000))
    flood = Flood(itertools.chain([growths(1, tree=SIBLINGS)] * 300, itertools.repeat(draft_pb2.DraftResponse())))
    with pytest.raises(HostileReplica, match="heartbeats"):
        await link.run()
    assert len(lane._inbox) == 300 + 1


def test_what_closed_sequences_did_not_use_is_not_kept_for_ever() -> None:
    leftover = Leftover(0.0)
    for second in range(10_000):
        leftover.add_unused(SPARE, float(second))
    assert 60 * SPARE < leftover.use(0) < 100 * SPARE, "of the last minutes"
    assert leftover.use(100 * SPARE) < 0
