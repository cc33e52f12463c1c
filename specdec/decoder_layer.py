"""A decoder layer of the common kind in one call, computed by decoder_layer.c, on CPUs with AVX512-BF16: to carry the
few rows of a decoding pass through the forty small operations of a layer takes as long as to compute its attention.

Knows one layer; refuses to know models, and which of their layers are of that kind (``specdec.fused_layers``).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from specdec.kernels import kernel
from specdec.packed_attention import PackedPass
from specdec.paged_attention import Attention
from specdec.tiled_linear import Linear

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int32


class _Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("epsilon", ctypes.c_float))

    @classmethod
    def of(cls, norm: Any) -> _Norm:
        """Of an RMS norm, or of None."""
        if norm is None:
            return cls()
        epsilon = getattr(norm, "variance_epsilon", None)
        return cls(norm.weight.data_ptr(), norm.eps if epsilon is None else epsilon)


LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
NORMS = ("input_layernorm", "post_attention_layernorm"), ("q_norm", "k_norm")


class _Weights(ctypes.Structure):
    _fields_ = (
        *((name, Linear) for names in LINEARS for name in names),
        *((name, _Norm) for names in NORMS for name in names),
        ("hidden_size", _INT),
    )

    @classmethod
    def of(cls, layer: Any) -> _Weights:
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            *(getattr(attention, name).described for name in LINEARS[0]),
            *(getattr(mlp, name).described for name in LINEARS[1]),
            *(_Norm.of(getattr(layer, name)) for name in NORMS[0]),
            *(_Norm.of(getattr(attention, name, None)) for name in NORMS[1]),
            attention.q_proj.in_features,
        )


class _Buffers(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("input", "cos", "sin", "output")),
        *((name, _POINTER) for name in ("normed", "query", "key", "value", "attended", "gated")),
        ("num_rows", _INT),
        ("num_threads", _INT),
    )


class AttentionSettings(NamedTuple):
    """What a layer's own code asks of its attention."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None


class DecoderLayer(torch.nn.Module):
    """In place of ``layer``, which it computes."""

    def __init__(self, layer: torch.nn.Module, attention: AttentionSettings) -> None:
        super().__init__()
        self.layer = layer
        self.sliding_window = attention.window
        self.attention = attention
        self._weights = _Weights.of(layer)

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], packed_pass: PackedPass, **_: Any
    ) -> Tensor:  # [1, rows, hidden_size]
        number, heads, kv_heads, head_dim, scale, _window = self.attention
        sizes = (hidden_states.shape[1], heads, kv_heads, head_dim, self._weights.gate_proj.out_features)
        work = packed_pass.shared.get(sizes)
        if work is None:
            work = packed_pass.shared[sizes] = _Work(hidden_states, *sizes)
        keys, values = packed_pass.layer(number, work.key, work.value)
        attention = Attention.over(keys, values, heads, scale, self.sliding_window)
        output = torch.empty_like(hidden_states)
        work.buffers.input, work.buffers.output = hidden_states.data_ptr(), output.data_ptr()
        work.buffers.cos, work.buffers.sin = (tensor.data_ptr() for tensor in position_embeddings)
        structures = packed_pass.paged.for_groups(heads // kv_heads), attention, self._weights, work.buffers
        compute = compute_decoder_layer()
        assert compute is not None
        compute(*map(ctypes.byref, structures))
        return output


class _Work:
    """Memory that the layers of a pass use, one after the other."""

    def __init__(
        self, like: Tensor, num_rows: int, heads: int, kv_heads: int, head_dim: int, num_features: int
    ) -> None:
        self.query, attended = like.new_zeros(2, num_rows, heads, head_dim)  # padding attends to nothing
        self.key, self.value = like.new_empty(2, num_rows, kv_heads, head_dim)
        normed, gated = torch.empty_like(like), like.new_empty(num_rows, num_features)
        self._kept = normed, self.query, self.key, self.value, attended, gated
        pointers = (tensor.data_ptr() for tensor in self._kept)
        self.buffers = _Buffers(*[None] * 4, *pointers, num_rows, torch.get_num_threads())


@functools.cache
def compute_decoder_layer() -> Callable[..., None] | None:
    """None where this machine cannot."""
    return kernel("decoder_layer", *[_POINTER] * 4)
