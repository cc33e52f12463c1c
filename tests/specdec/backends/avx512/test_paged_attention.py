"""Which tensors the kernel takes; what it computes is in the contract of backends."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec.backends.avx512 import paged_attention
from tests.models.backends import AVX512_ONLY

pytestmark = AVX512_ONLY


def inputs(head_dim: int, dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Queries, keys and values of three rows."""
    return [torch.zeros(3, heads, head_dim, dtype=dtype) for heads in (4, 2, 2)]


def apart(which: int) -> list[Tensor]:
    """One of them with gaps between its numbers."""
    tensors = inputs(64)
    tensors[which] = tensors[which].repeat_interleave(2, 2)[:, :, ::2]
    return tensors


@pytest.mark.parametrize("head_dim", [32, 96, 256])
def test_heads_that_fill_registers_are_taken(head_dim: int) -> None:
    assert paged_attention.takes(*inputs(head_dim))


@pytest.mark.parametrize(
    "others", [inputs(16), inputs(80), inputs(288), inputs(64, torch.float32), *map(apart, range(3))]
)
def test_others_are_not(others: list[Tensor]) -> None:
    assert not paged_attention.takes(*others)
