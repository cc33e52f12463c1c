"""Attention computed by paged_attention.c, which reads keys and values directly from the pool.

Knows a pass's rows; does not know models. Every row of a tree is computed as the end of a text of its own, so that only
later keys, and keys before the window, are masked.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from specdec.backends.avx512.kernels import kernel
from specdec.backends.packed_pass import Attention, PackedPass
from specdec.kvcache.store import KvStore
from specdec.passes.rows import KeyCounts, PassRows

LANES, LINE, MAX_HEAD_DIM = 32, 32, 256  # as in paged_attention.c
_ANY_COUNT = KeyCounts((), 1)
_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64


class _Rows(ctypes.Structure):
    _fields_ = (("at", _POINTER), ("row", _LONG), ("head", _LONG))

    @classmethod
    def of(cls, tensor: Tensor) -> _Rows:  # [rows, heads, head_dim]
        return cls(tensor.data_ptr(), tensor.stride(0), tensor.stride(1))


class Pass(ctypes.Structure):
    """The C structure of a pass. ``arrays``: the int32 arrays that it points to; ``starts``: the place in ``keys`` of
    each chain's first key."""

    _fields_ = (
        *((name, _POINTER) for name in ("slots", "keys", "rows", "num_seen", "tiles")),
        *((name, _INT) for name in ("num_rows", "num_tiles")),
    )
    arrays: list[np.ndarray]
    starts: list[int]


class LayerAttention(ctypes.Structure):
    """The C structure of a layer's attention and its pool."""

    _fields_ = (
        *((name, _POINTER) for name in ("keys", "values")),
        *((name, _INT) for name in ("heads", "kv_heads", "head_dim", "window")),
        ("scale", ctypes.c_float),
    )

    @classmethod
    def over(cls, keys: Tensor, values: Tensor, heads: int, scale: float, window: int | None) -> LayerAttention:
        """``keys`` and ``values``: the layer's whole pool, [num_blocks, block_size, kv_heads, head_dim]."""
        pool = keys.data_ptr(), values.data_ptr()
        return cls(*pool, heads, *keys.shape[2:], window or 2**31 - 1, scale * math.log2(math.e))


def takes(query: Tensor, key: Tensor, value: Tensor) -> bool:
    """Whether paged_attention.c can compute such tensors [rows, heads, head_dim] on this machine."""
    head_dim = query.shape[2]
    return (
        query.device.type == "cpu"
        and query.dtype is torch.bfloat16
        and key.dtype is torch.bfloat16
        and head_dim == value.shape[2]
        and head_dim % LINE == 0
        and head_dim <= MAX_HEAD_DIM
        and query.stride(2) == key.stride(2) == value.stride(2) == 1
        and _compute() is not None
    )


class PagedAttention:
    """The attention of one pass, for all its layers. ``otherwise`` computes the layers that this one cannot."""

    def __init__(self, rows: PassRows, otherwise: Attention) -> None:
        self._rows = rows
        self._otherwise = otherwise
        self._passes: dict[int, Pass] = {}

    @staticmethod
    def of(packed_pass: PackedPass) -> PagedAttention:
        """The attention of a pass that this backend made."""
        assert isinstance(packed_pass.attention, PagedAttention)
        return packed_pass.attention

    def attend(
        self,
        store: KvStore,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """See specdec.backends.packed_pass.Attention."""
        if softcap is not None or not takes(query, key, value):
            self._otherwise.attend(store, layer, query, key, value, output, scale, window, softcap)
            return
        keys, values = store.layer(layer, key, value)
        heads, kv_heads = query.shape[1], key.shape[1]
        attention = LayerAttention.over(keys, values, heads, scale, window)
        rows = (ctypes.byref(_Rows.of(tensor)) for tensor in (query, key, value, output))
        compute = _compute()
        assert compute is not None
        compute(
            ctypes.byref(self.for_groups(heads // kv_heads)), ctypes.byref(attention), *rows, torch.get_num_threads()
        )

    def for_groups(self, groups: int) -> Pass:
        """The pass for ``groups`` query heads per key head, made once."""
        if groups not in self._passes:
            self._passes[groups] = self._described(groups)
        return self._passes[groups]

    def _described(self, groups: int) -> Pass:
        members = list(self._rows.members(_ANY_COUNT, only_chains=True))
        keys, starts = self._rows.key_slots(members)
        rows: list[int] = []
        num_seen: list[int] = []
        tiles: list[tuple[int, int, int, int, int]] = []
        for member, start in zip(members, starts, strict=True):
            seen = [member.row_positions[row] + 1 for row in member.rows]
            num = len(seen) * groups
            num_tiles = -(-num // LANES)
            bounds = [num * tile // num_tiles for tile in range(num_tiles + 1)]
            # The longest tiles first, so that no thread ends with a long one.
            tiles += [
                (-seen[(end - 1) // groups], start, len(rows), first, end - first)
                for first, end in itertools.pairwise(bounds)
            ]
            rows += member.pass_rows
            num_seen += seen
        tiles.sort()
        slots = self._rows.slots
        numbers = np.array([*slots, *rows, *num_seen, *(number for tile in tiles for number in tile[1:])], np.int32)
        places = itertools.accumulate((len(slots), len(rows), len(num_seen)), initial=0)
        of_slots, of_rows, of_seen, of_tiles = (numbers.ctypes.data + numbers.itemsize * place for place in places)
        made = Pass(of_slots, keys.ctypes.data, of_rows, of_seen, of_tiles, len(slots), len(tiles))
        made.arrays, made.starts = [numbers, keys], starts
        return made


@functools.cache
def _compute() -> Callable[..., int] | None:
    return kernel("paged_attention", *[_POINTER] * 6, _INT)
