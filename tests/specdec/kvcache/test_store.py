"""What is written is what is read, bit for bit, as far as it is numbers."""

from __future__ import annotations

import pytest
import torch

from specdec.kvcache.block_pool import BlockPool
from specdec.kvcache.store import KvStore


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_keep_their_bits_and_what_is_none_becomes_nothing(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    numbers = [0.0, -0.0, 1.0, info.max, info.min, info.tiny, -info.tiny, info.tiny / 2, info.eps]
    others = [torch.nan, -torch.nan, torch.inf, -torch.inf]
    rows = torch.tensor([*numbers, *others], dtype=dtype)[:, None, None]  # [rows, 1 head, 1 number]
    store = KvStore(BlockPool(4, 4), torch.device("cpu"))
    store.write(0, torch.arange(len(rows)), rows, -rows)
    keys, values = store.layer(0, rows, rows)
    for stored, written in ((keys, rows), (values, -rows)):
        bits = stored.flatten().view(torch.uint8).view(16, -1)  # a row per slot
        expected = written.contiguous().flatten().view(torch.uint8).view(len(rows), -1)
        assert torch.equal(bits[: len(numbers)], expected[: len(numbers)])
        assert not bits[len(numbers) :].any()
