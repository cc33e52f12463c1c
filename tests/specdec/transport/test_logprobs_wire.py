"""Logprobs on the wire: what a peer sent is checked, and a long prompt comes in parts."""

from __future__ import annotations

import math

import pytest

from specdec.core.errors import InvalidArgument
from specdec.core.rounds import Logprobs, Verdict
from specdec.transport.logprobs_wire import (
    PER_PART,
    read_logprobs,
    read_prompt_logprobs,
    write_logprobs,
    write_prompt_logprobs,
)
from specdec.v1 import common_pb2


def test_what_is_written_is_read():
    told = Logprobs([-0.5, -2.0], [3, 1, 0, 2], [-0.25, -1.0, -0.5, -math.inf])
    read = read_logprobs(write_logprobs(told), 4)
    assert (read, read.num_top, len(read)) == (told, 2, 2)


@pytest.mark.parametrize(
    "fields",
    [
        {"logprobs": [0.1]},
        {"logprobs": [math.nan]},
        {"logprobs": [-1.0], "top_ids": [1], "top_logprobs": [math.nan]},
        {"logprobs": [-1.0], "top_ids": [1]},
        {"logprobs": [-1.0, -1.0], "top_ids": [1, 2, 3], "top_logprobs": [-1.0] * 3},
        {"logprobs": [-1.0], "top_ids": [4], "top_logprobs": [-1.0]},
    ],
)
def test_what_no_model_can_mean_is_refused(fields):
    with pytest.raises(InvalidArgument, match="logprobs"):
        read_logprobs(common_pb2.Logprobs(**fields), 4)


def test_a_long_prompt_comes_in_parts():
    length, top = 3000, 20
    told = Logprobs([-1.0] * length, list(range(top)) * length, [-1.0] * top * length)
    parts = list(write_prompt_logprobs(7, Verdict(0, 9, (), 1, prompt_logprobs=told)))
    assert len(parts) > 1
    assert all(len(part.logprobs.logprobs) * (1 + top) <= PER_PART for part in parts)
    assert all(part.ByteSize() < 1 << 16 for part in parts)
    read = [read_prompt_logprobs(part, 100) for part in parts]
    assert Logprobs.joined([each.logprobs for each in read]) == told
    positions = [1]
    for each in read:
        assert each.position == positions[-1]
        positions.append(each.position + len(each.logprobs))
    assert list(write_prompt_logprobs(7, Verdict(0, 9, (), 1))) == []
