"""Decoder layers of the common kind, computed in one call of decoder_pass.c. With the few rows of a decoding pass, the
overhead of a layer's forty small operations takes as long as its attention.

Knows consecutive layers; does not know models, or which of their layers are of the common kind
(``specdec.backends.avx512.fused_layers``).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specdec.backends.avx512.kernels import kernel
from specdec.backends.avx512.paged_attention import LayerAttention, PagedAttention
from specdec.backends.avx512.tiled_linear import Linear
from specdec.backends.layer_parts import LINEARS, NORMS
from specdec.backends.observed_pass import AttentionSettings
from specdec.backends.packed_pass import PackedPass
from specdec.kvcache.store import KvStore

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int32


class Norm(ctypes.Structure):
    _fields_ = (("weight", _POINTER), ("epsilon", ctypes.c_float))

    @classmethod
    def of(cls, norm: Any) -> Norm:
        """The structure of an RMS norm, or of no norm (None)."""
        if norm is None:
            return cls()
        epsilon = getattr(norm, "variance_epsilon", None)
        return cls(norm.weight.data_ptr(), norm.eps if epsilon is None else epsilon)

    @staticmethod
    def takes(norm: Any) -> bool:
        """Whether ``norm`` has the attributes of a bfloat16 RMS norm."""
        weight = getattr(norm, "weight", None)
        has_epsilon = hasattr(norm, "variance_epsilon") or isinstance(getattr(norm, "eps", None), float)
        return has_epsilon and isinstance(weight, Tensor) and weight.dtype is torch.bfloat16 and weight.is_contiguous()


class Weights(ctypes.Structure):
    _fields_ = (
        *((name, Linear) for names in LINEARS for name in names),
        *((name, Norm) for names in NORMS for name in names),
        ("hidden_size", _INT),
    )

    @classmethod
    def of(cls, layer: Any) -> Weights:
        attention, mlp = layer.self_attn, layer.mlp
        return cls(
            *(getattr(attention, name).described for name in LINEARS[0]),
            *(getattr(mlp, name).described for name in LINEARS[1]),
            *(Norm.of(getattr(layer, name)) for name in NORMS[0]),
            *(Norm.of(getattr(attention, name, None)) for name in NORMS[1]),
            attention.q_proj.in_features,
        )


class Buffers(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("rows", "cos", "sin")),
        *((name, _POINTER) for name in ("normed", "query", "key", "value", "attended", "gated")),
        ("num_rows", _INT),
    )


class DecoderLayer(torch.nn.Module):
    """Replaces ``layer`` and computes it. The leader of a run also computes the layers after it, which do nothing."""

    def __init__(self, layer: torch.nn.Module, attention: AttentionSettings) -> None:
        super().__init__()
        self.layer = layer
        self.sliding_window = attention.window
        self.attention = attention
        self._weights = Weights.of(layer)
        self._run: tuple[DecoderLayer, ...] = ()  # those that it computes
        self._together: tuple[DecoderLayer, ...] = ()  # those that are computed in one call with it
        self.lead([self])

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that must be equal for all layers of one call."""
        _, heads, kv_heads, head_dim, *_ = self.attention
        return self._weights.hidden_size, heads, kv_heads, head_dim, self._weights.gate_proj.out_features

    @property
    def num_led(self) -> int:
        """Number of layers that it computes; 0: an earlier layer computes this one."""
        return len(self._run)

    def lead(self, run: Sequence[DecoderLayer]) -> None:
        """Become the leader of ``run``: this layer and those after it, of equal sizes, each the input of the next."""
        self._run = tuple(run)
        self._all_weights = (Weights * len(run))(*(layer._weights for layer in run))
        for layer in self._run:
            layer._together = self._run
        for layer in self._run[1:]:
            layer._run = ()

    def register_forward_pre_hook(self, *arguments: Any, **options: Any) -> Any:
        """A hook gets what enters this layer, so it leads the rest of its run from now on."""
        run = self._together
        if at := run.index(self):
            run[0].lead(run[:at])
            self.lead(run[at:])
        return super().register_forward_pre_hook(*arguments, **options)

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], packed_pass: PackedPass, **_: Any
    ) -> Tensor:  # [1, rows, hidden_size]
        if not self._run:
            return hidden_states
        rows = hidden_states.clone()
        key = rows.shape[1], self.sizes
        work = packed_pass.shared.get(key)
        if work is None:
            work = packed_pass.shared[key] = Work(rows.shape[1], self.sizes, rows.dtype)
        packed_pass.values_are(work.value)
        self.compute(packed_pass, work.buffers(rows[0], *position_embeddings))
        return rows

    def compute(
        self,
        packed_pass: PackedPass,
        buffers: Buffers,
        ends: ctypes.Structure | None = None,
        further: ctypes.Structure | None = None,
    ) -> None:
        """Compute all layers of the run. ``ends``, ``further``: see specdec.backends.avx512.decoder_pass.

        Raises MemoryError.
        """
        compute = compute_decoder_layers()
        assert compute is not None
        groups = self.attention.heads // self.attention.kv_heads
        there_was_memory = compute(
            ctypes.byref(PagedAttention.of(packed_pass).for_groups(groups)),
            packed_pass.store.described(self, self._attentions),
            self._all_weights,
            len(self._run),
            None if ends is None else ctypes.byref(ends),
            None if further is None else ctypes.byref(further),
            ctypes.byref(buffers),
            torch.get_num_threads(),
        )
        if not there_was_memory:
            raise MemoryError("there is no memory for the buffers that the threads of a pass share")

    def _attentions(self, store: KvStore) -> ctypes.Array[LayerAttention]:
        like = torch.empty(0, self.attention.kv_heads, self.attention.head_dim, dtype=torch.bfloat16)
        described = (LayerAttention * len(self._run))()
        for number, layer in enumerate(self._run):
            asked = layer.attention
            pool = store.layer(asked.layer, like, like)
            described[number] = LayerAttention.over(*pool, asked.heads, asked.scale, layer.sliding_window)
        return described


class Work:
    """Buffers for up to ``num_rows`` rows, which the layers of a pass use one after the other."""

    def __init__(self, num_rows: int, sizes: tuple[int, ...], dtype: torch.dtype) -> None:
        hidden_size, heads, kv_heads, head_dim, num_features = sizes
        empty = functools.partial(torch.empty, dtype=dtype)
        self.query, self.key = empty(num_rows, heads, head_dim), empty(num_rows, kv_heads, head_dim)
        self.value = torch.empty_like(self.key)
        attended = torch.zeros_like(self.query)  # zeros for padding rows, which attention does not write
        normed, gated = empty(num_rows, hidden_size), empty(num_rows, num_features)
        self.tensors = normed, self.query, self.key, self.value, attended, gated

    def buffers(self, rows: Tensor, cos: Tensor, sin: Tensor) -> Buffers:
        """The structure of all buffers, with rows [rows, hidden_size] and their angles [rows, head_dim]."""
        return Buffers(*(tensor.data_ptr() for tensor in (rows, cos, sin, *self.tensors)), len(rows))


@functools.cache
def compute_decoder_layers() -> Callable[..., int] | None:
    """The function of decoder_pass.c; None if this machine cannot run it."""
    return kernel("decoder_pass", *[_POINTER] * 3, _INT, *[_POINTER] * 3, _INT)
