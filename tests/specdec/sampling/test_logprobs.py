"""Logprobs: log-softmax in float32, the likeliest first, of equal ones the lowest id; a row depends on itself alone."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec.sampling.logprobs import logprobs_of


@given(st.lists(st.sampled_from([-2.5, -1.0, -0.0, 0.0, 0.5, 3.0]), min_size=3, max_size=9), st.integers(0, 12))
def test_the_likeliest_come_first_and_of_equal_ones_the_lowest_id(values, top):
    row = torch.tensor([values])
    [result] = logprobs_of([row], [[1]], [top], 1 << 20)
    expected = row.log_softmax(-1)[0]
    order = sorted(range(len(values)), key=lambda token: (-float(expected[token]), token))[:top]
    if -0.0 not in values:  # which is less than 0.0 here and equal elsewhere
        assert result.top_ids == order
    assert result.top_logprobs == [float(expected[token]) for token in result.top_ids]
    assert result.logprobs == [float(expected[1])]


def test_a_row_gets_the_same_numbers_in_any_company():
    torch.manual_seed(3)
    rows = torch.randn(40, 5003).to(torch.bfloat16)  # many equal ones
    tokens = [place * 7 % 5003 for place in range(40)]
    [every] = logprobs_of([rows], [tokens], [20], 1 << 30)
    parts = logprobs_of([rows[:1], rows[1:9], rows[9:]], [tokens[:1], tokens[1:9], tokens[9:]], [20, 3, 20], 1 << 14)
    assert [value for part in parts for value in part.logprobs] == every.logprobs
    assert parts[1].num_top == 3
    for place, part in enumerate((parts[0], parts[2])):
        start = (0, 9)[place]
        same = every.part(start, start + len(part))
        assert (part.top_ids, part.top_logprobs) == (same.top_ids, same.top_logprobs)
    assert parts[1].top_ids[:3] == every.part(1, 2).top_ids[:3]
