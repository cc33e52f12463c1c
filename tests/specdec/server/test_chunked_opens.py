"""Opens in chunks: whole in the end, never more than there may be, and of their frames nothing else is kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from specdec.core.errors import InvalidArgument, Overloaded
from specdec.server import chunked_opens
from specdec.server.chunked_opens import ChunkedOpens
from specdec.v1 import common_pb2, target_pb2


def chunk(sequence: int, token_ids: Any, more: bool) -> target_pb2.TargetOpen:
    return target_pb2.TargetOpen(sequence=sequence, spec=common_pb2.SequenceSpec(token_ids=token_ids), more=more)


def test_chunks_become_one_open_whatever_comes_between_them() -> None:
    opens = ChunkedOpens()
    assert opens.add(chunk(1, [1, 2], True)) is None
    assert opens.add(chunk(2, [7], True)) is None
    assert opens.add(alone := chunk(3, [5], False)) is alone
    assert opens.add(chunk(1, [3], True)) is None
    assert (1 in opens, sorted(opens)) == (True, [1, 2])
    assert list(opens.add(chunk(1, [4], False)).spec.token_ids) == [1, 2, 3, 4]
    assert (1 in opens, sorted(opens)) == (False, [2])


def test_of_a_frame_with_an_unfinished_open_nothing_else_is_kept() -> None:
    """A part of a message keeps the whole of it: a thousand small opens could hold on to frames of 16 MiB each."""
    frame = target_pb2.VerifyRequest(opens=[chunk(1, [1, 2], True)], closes=range(1000))
    opens = ChunkedOpens()
    opens.add(frame.opens[0])
    frame.opens[0].spec.token_ids.append(99)  # would be seen in what is kept, were it a part of the frame
    assert list(opens.add(chunk(1, [3], False)).spec.token_ids) == [1, 2, 3]


def test_a_chunk_costs_the_same_however_many_opens_are_unfinished() -> None:
    num_looks = 0

    class Ids(list[int]):
        def __len__(self) -> int:
            nonlocal num_looks
            num_looks += 1
            return super().__len__()

    class Open(SimpleNamespace):
        def __init__(self) -> None:
            super().__init__(sequence=0, spec=SimpleNamespace(token_ids=Ids()), more=True)

        def CopyFrom(self, other: Any) -> None:
            self.__dict__.update(other.__dict__)

    opens = ChunkedOpens()
    looks = []
    for sequence in range(200):
        made = Open()
        made.sequence = sequence
        before = num_looks
        opens.add(made)
        looks.append(num_looks - before)
    assert set(looks) == {looks[0]}


def test_an_open_that_was_dropped_or_finished_takes_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_opens, "MAX_OPEN_IDS", 10)
    opens = ChunkedOpens()
    for sequence in range(0, 40, 4):
        opens.add(chunk(sequence, [1] * 6, True))
        with pytest.raises(Overloaded, match="more than 10 ids"):
            opens.add(chunk(sequence + 1, [1] * 5, True))
        opens.drop(sequence + 1)
        opens.add(chunk(sequence + 2, [1] * 4, True))
        with pytest.raises(InvalidArgument, match="at most 10, not 11"):
            opens.add(chunk(sequence, [1] * 5, False))
        opens.drop(sequence)
        assert opens.add(chunk(sequence + 2, [1] * 6, False)) is not None
        assert not list(opens)
