"""Frames of both services: as few as possible, none too long, nothing lost."""

from __future__ import annotations

from draft_service.codec import DraftCodec
from specdec.core.errors import PassFailed
from specdec.core.rounds import Growth, GrowthEnd, Load, Verdict
from specdec.core.tree import SparseDistribution, TokenTree
from specdec.transport.framing import FRAME_BYTES
from specdec.transport.wire import read_growth, read_verdict
from target_service.codec import TargetCodec
from testing.table_model import Table

INFO = Table(vocab_size=152_000).info("table")
LOAD = Load(passes=3)


def test_chains_with_distributions_of_many_sequences_go_out_in_several_frames():
    """570 sequences with 64 draft tokens each made a frame of more than a peer takes, and all lost their stream."""
    distribution = SparseDistribution(tuple(range(150_000, 150_064)), (1.0,) * 64)
    tree = TokenTree.chain([150_000] * 64, [distribution] * 64)
    growths = [(number, Growth(1, 5, (), tree, GrowthEnd.BUDGET)) for number in range(200)]
    frames = list(DraftCodec(INFO).frames(growths, [], LOAD))
    assert len(frames) > 2
    assert all(frame.ByteSize() < 1.1 * FRAME_BYTES for frame in frames)
    assert len(frames) < 1.1 * sum(frame.ByteSize() for frame in frames) / FRAME_BYTES + 1
    told = [(each.sequence, read_growth(each, INFO.vocab_size)) for frame in frames for each in frame.growths]
    assert told == growths
    assert all(frame.load.passes == 3 for frame in frames)


def test_verdicts_that_waited_for_their_peer_go_out_in_several_frames():
    verdicts = [(number % 7, Verdict(1, 5 + number, (3,) * 1000, 3)) for number in range(3_000)]
    verdicts[1_500:1_500] = [(9, PassFailed("x"))]
    frames = list(TargetCodec(INFO).frames(verdicts, [4, 5], LOAD))
    assert len(frames) > 2
    assert all(frame.ByteSize() < 1.1 * FRAME_BYTES for frame in frames)
    told = [(each.sequence, read_verdict(each, INFO.vocab_size)) for frame in frames for each in frame.verdicts]
    assert told == [each for each in verdicts if each[0] != 9]
    assert [error.sequence for frame in frames for error in frame.errors] == [9]
    assert [each.sequence for frame in frames for each in frame.progress] == [4, 5]


def test_a_short_answer_is_one_frame():
    assert len(list(TargetCodec(INFO).frames([(1, Verdict(1, 5, (), 3))] * 100, [4], LOAD))) == 1
    assert len(list(TargetCodec(INFO).frames([], [], LOAD))) == 1
    assert len(list(DraftCodec(INFO).frames([], [], LOAD))) == 1
