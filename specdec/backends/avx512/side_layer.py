"""A layer next to a model (``specdec.backends.side_layer``), computed by the pass of decoder_pass.c over a list of one
layer: its attention, then the rest. It takes two calls, because the rows that enter the attention are others than those
that its output is added to.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.backends.avx512.decoder_layer import Buffers, Norm, Weights, compute_decoder_layers
from specdec.backends.avx512.fused_layers import is_silu
from specdec.backends.avx512.paged_attention import LINE, MAX_HEAD_DIM, LayerAttention, PagedAttention, Pass
from specdec.backends.avx512.tiled_linear import COLUMNS, Linear, TiledLinear
from specdec.backends.packed_pass import PackedPass
from specdec.backends.side_layer import SideLayer
from specdec.kvcache.store import KvStore

_MULTIPLE = 16  # of the numbers of a row, as in decoder_layer.c
_UNIT = 40
"""Binary logarithm of a weight that undoes the factor of a norm with this weight squared as its epsilon: rows are as
before, to the last bit."""

_MIN_POSITIONS = 1024


class FusedSideLayer(torch.nn.Module):
    """Replaces ``layer`` and computes it."""

    def __init__(self, layer: SideLayer) -> None:
        super().__init__()
        self.layer = layer  # keeps the memory alive that C points to
        options = layer.options
        self._width, self._size = layer.to_heads.in_features, layer.o_proj.out_features
        self._widths = layer.widths
        query, key, value = _parts(layer.to_heads, self._widths)
        num_features = layer.down_proj.in_features
        gate, up = _parts(layer.to_features, (num_features, num_features))
        self._ones = torch.full((max(self._width, self._size),), 2.0**_UNIT, dtype=torch.bfloat16)
        as_before = Norm(self._ones.data_ptr(), 2.0 ** (2 * _UNIT))
        norms = {"input_layernorm": as_before, "post_attention_layernorm": as_before}
        self._attention = Weights(q_proj=query, k_proj=key, v_proj=value, hidden_size=self._width, **norms)
        norms["post_attention_layernorm"] = Norm(layer.norm.data_ptr(), options.eps)
        output, down = layer.o_proj.described, layer.down_proj.described
        self._rest = Weights(o_proj=output, gate_proj=gate, up_proj=up, down_proj=down, hidden_size=self._size, **norms)
        self._num_positions = 0
        compute = compute_decoder_layers()
        assert compute is not None
        self._compute: Callable[..., int] = compute

    @staticmethod
    def takes(layer: SideLayer) -> bool:
        """Whether decoder_pass.c computes it on this machine. Its linear layers are TiledLinear where they can be."""
        linears = layer.to_heads, layer.o_proj, layer.to_features, layer.down_proj
        if compute_decoder_layers() is None or not all(type(linear) is TiledLinear for linear in linears):
            return False
        sizes = layer.to_heads.in_features, layer.o_proj.out_features, layer.down_proj.in_features
        return (
            all(size % _MULTIPLE == 0 for size in sizes)
            and all(width % COLUMNS == 0 for width in (*layer.widths, sizes[-1]))  # whole tiles of a joined weight
            and layer.options.head_dim % LINE == 0
            and layer.options.head_dim <= MAX_HEAD_DIM
            and is_silu(layer.options.activation)
        )

    def forward(self, inputs: Tensor, states: Tensor, packed_pass: PackedPass, *, layer: int) -> Tensor:
        """See SideLayer. Raises MemoryError."""
        rows, inputs = states.clone(memory_format=torch.contiguous_format), inputs.contiguous()
        num_rows, options = len(rows), self.layer.options
        positions = packed_pass.rows.positions
        self._have_positions(max(positions, default=0) + 1)
        angles = self._angles.take(positions, 1)  # [cos and sin, rows, head_dim]
        widths = (max(self._width, self._size), *self._widths, self._widths[0], self.layer.down_proj.in_features)
        work = [np.empty((num_rows, width), np.int16) for width in widths]  # bfloat16
        angles_at, size = angles.ctypes.data, angles.strides[0]
        buffers = Buffers(inputs.data_ptr(), angles_at, angles_at + size, *(at.ctypes.data for at in work), num_rows)
        described = packed_pass.store.described((self, layer), lambda store: self._over(store, layer))
        groups = options.num_heads * options.head_dim // self._widths[1]
        self._call(PagedAttention.of(packed_pass).for_groups(groups), described, self._attention, buffers)
        buffers.rows = rows.data_ptr()
        self._call(Pass(), described, self._rest, buffers)
        return rows

    def _call(self, rows: Pass, attention: LayerAttention, weights: Weights, buffers: Buffers) -> None:
        pointers = map(ctypes.byref, (rows, attention, weights))
        if not self._compute(*pointers, 1, None, None, ctypes.byref(buffers), torch.get_num_threads()):
            raise MemoryError("there is no memory for the buffers that the threads of a pass share")

    def _over(self, store: KvStore, layer: int) -> LayerAttention:
        options = self.layer.options
        like = torch.empty(0, self._widths[1] // options.head_dim, options.head_dim, dtype=torch.bfloat16)
        scale = options.head_dim**-0.5
        return LayerAttention.over(*store.layer(layer, like, like), options.num_heads, scale, options.window)

    def _have_positions(self, num_positions: int) -> None:
        if num_positions <= self._num_positions:
            return
        options, self._num_positions = self.layer.options, max(_MIN_POSITIONS, 2 * num_positions)
        angles = torch.arange(self._num_positions)[:, None].float() * options.rates
        both = torch.stack([angles.cos(), angles.sin()]) * options.rotary_scale
        self._angles: Any = both.bfloat16().repeat(1, 1, 2).view(torch.int16).numpy()


def _parts(joined: Any, widths: tuple[int, ...]) -> list[Linear]:
    """The linear layers that a joined one consists of: whole tiles, one after the other."""
    parts, start = [], 0
    for width in widths:
        weight, bias = joined.described.weight, joined.described.bias
        bias = None if bias is None else bias + start * 4
        parts.append(Linear(weight + start * joined.in_features * 2, bias, width, joined.in_features))
        start += width
    return parts
