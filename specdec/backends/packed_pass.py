"""Attention of packed rows over paged keys and values, as a transformers attention function.

Knows a pass and its layers; refuses to know models, sequences' lives, and how attention is computed: where keys and
values lie, if the CPU can (``specdec.backends.avx512.paged_attention``), or over what is gathered of them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from specdec.backends.avx512 import paged_attention
from specdec.backends.avx512.paged_attention import PagedAttention
from specdec.backends.torch.gathered_attention import GatheredAttention
from specdec.kvcache.store import KvStore
from specdec.passes.rows import PassRows, Segment

ATTENTION = "specdec_packed"


class PackedPass:
    """What the attention function knows of a pass."""

    def __init__(self, store: KvStore, segments: Sequence[Segment], block_size: int, device: torch.device) -> None:
        self.rows = PassRows(segments, block_size)
        self.store = store
        self._device = device
        self._last_values: Tensor | None = None  # [rows, kv_heads, head_dim], of the layer that came last
        self.gathered = GatheredAttention(self.rows, block_size, device)
        self.paged = PagedAttention(self.rows)
        self.shared: dict[Any, Any] = {}  # by its users' keys: memory that one layer takes after the other

    @functools.cached_property
    def _slots(self) -> Tensor:  # [rows]
        return torch.tensor(self.rows.slots, dtype=torch.int64, device=self._device)

    def sound(self) -> Tensor:  # [rows] bool
        """After the pass: the rows with nothing but numbers in them.

        A NaN stays in its row from layer to layer, and so is still there when the last one computes its values. (What
        goes wrong after that spoils no key and no value: only the row's own logits, which are looked at themselves.)
        """
        if self._last_values is None:  # a model that never asked for this attention: the probe will tell
            return torch.ones(len(self.rows), dtype=torch.bool, device=self._device)
        return self._last_values.sum((1, 2), dtype=torch.float32).isfinite()

    def values_are(self, values: Tensor) -> None:
        """A layer's [rows or more, kv_heads, head_dim]: at the latest when it has been computed."""
        self._last_values = values[: len(self.rows)]

    def attend(
        self,
        layer: int,
        query: Tensor,  # [padded rows, heads, head_dim]
        key: Tensor,  # [padded rows, kv_heads, head_dim]
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Attention of each row over its own text. Returns [padded rows, heads, head_dim]."""
        num_rows = len(self.rows)
        key, value = key[:num_rows], value[:num_rows]
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        output[num_rows:] = 0
        keys, values = self.store.layer(layer, key, value)
        self.values_are(value)
        if softcap is None and paged_attention.takes(query, key, value):
            self.paged.attend(query, key, value, keys, values, output, scale, window)
        else:
            self.store.write(layer, self._slots, key, value)
            self.gathered.attend(query, keys, values, output, scale, window, softcap)
        return output


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, rows, head_dim]
    key: Tensor,  # [1, kv_heads, rows, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_pass: PackedPass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Returns [1, rows, heads, head_dim]."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return packed_pass.attend(layer, query, key, value, scale, sliding_window, softcap)[None], None


AttentionInterface.register(ATTENTION, packed_attention)
