"""Decoder layers of the common kind in one call, computed by decoder_layer.c, on CPUs with AVX512-BF16: to carry the
few rows of a decoding pass through the forty small operations of a layer takes as long as to compute its attention.

Knows layers that follow each other; refuses to know models, and which of their layers are of that kind
(``specdec.fused_layers``).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
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
        *((name, _POINTER) for name in ("rows", "cos", "sin")),
        *((name, _POINTER) for name in ("normed", "query", "key", "value", "attended", "gated")),
        ("num_rows", _INT),
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
    """In place of ``layer``, which it computes, and those that follow it if it leads them, which then do nothing."""

    def __init__(self, layer: torch.nn.Module, attention: AttentionSettings) -> None:
        super().__init__()
        self.layer = layer
        self.sliding_window = attention.window
        self.attention = attention
        self._weights = _Weights.of(layer)
        self.lead([self])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The same for all layers of one call."""
        _, heads, kv_heads, head_dim, *_ = self.attention
        return self._weights.hidden_size, heads, kv_heads, head_dim, self._weights.gate_proj.out_features

    @property
    def num_led(self) -> int:
        """Layers that it computes; 0: one before it does that for it."""
        return len(self._run)

    def lead(self, run: Sequence[DecoderLayer]) -> None:
        """Compute ``run``, of the same sizes: this layer and those after it, each fed with what the last one gives."""
        self._run = tuple(run)
        self._all_weights = (_Weights * len(run))(*(layer._weights for layer in run))
        for layer in self._run[1:]:
            layer._run = ()

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], packed_pass: PackedPass, **_: Any
    ) -> Tensor:  # [1, rows, hidden_size]
        if not self._run:
            return hidden_states
        rows = hidden_states.clone()
        key = rows.shape[1], self.sizes
        work = packed_pass.shared.get(key)
        if work is None:
            work = packed_pass.shared[key] = _Work(rows, *self.sizes[1:])
        attentions = (Attention * len(self._run))()
        for number, layer in enumerate(self._run):
            keys, values = packed_pass.layer(layer.attention.layer, work.key, work.value)
            asked = layer.attention
            attentions[number] = Attention.over(keys, values, asked.heads, asked.scale, layer.sliding_window)
        cos, sin = position_embeddings
        pointers = (tensor.data_ptr() for tensor in (rows, cos, sin, *work.tensors))
        compute = compute_decoder_layers()
        assert compute is not None
        compute(
            ctypes.byref(packed_pass.paged.for_groups(self.attention.heads // self.attention.kv_heads)),
            attentions,
            self._all_weights,
            len(self._run),
            ctypes.byref(_Buffers(*pointers, rows.shape[1])),
            torch.get_num_threads(),
        )
        return rows


class _Work:
    """Memory that the layers of a pass use, one after the other."""

    def __init__(self, like: Tensor, heads: int, kv_heads: int, head_dim: int, num_features: int) -> None:
        num_rows = like.shape[1]
        self.query, attended = like.new_zeros(2, num_rows, heads, head_dim)  # padding attends to nothing
        self.key, self.value = like.new_empty(2, num_rows, kv_heads, head_dim)
        normed, gated = torch.empty_like(like), like.new_empty(num_rows, num_features)
        self.tensors = normed, self.query, self.key, self.value, attended, gated


@functools.cache
def compute_decoder_layers() -> Callable[..., None] | None:
    """None where this machine cannot."""
    return kernel("decoder_layers", *[_POINTER] * 3, _INT, _POINTER, _INT)
