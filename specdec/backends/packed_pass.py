"""The attention layers' view of one pass, and the attention function that transformers calls.

A backend's ``Attention`` computes it.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from specdec.kvcache.store import KvStore
from specdec.passes.rows import PassRows

ATTENTION = "specdec_packed"


class Attention(Protocol):
    """The attention of one pass, for all its layers."""

    def attend(
        self,
        store: KvStore,
        layer: int,
        query: Tensor,  # [rows or more, heads, head_dim]; rows beyond the pass are padding
        key: Tensor,  # [rows, kv_heads, head_dim]
        value: Tensor,
        output: Tensor,  # [rows or more, heads, head_dim]
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """Store the rows' keys and values in the pool, and write each row's attention over its own text to ``output``.

        A key or value that is NaN or infinite is stored as 0.
        """


class PackedPass:
    """The context that the attention function gets for a pass."""

    def __init__(self, store: KvStore, rows: PassRows, attention: Attention, num_rows: int | None = None) -> None:
        """``num_rows``: those that attention computes, if it computes padding as well."""
        self.num_rows = len(rows) if num_rows is None else num_rows
        self.store = store
        self.rows = rows
        self.attention = attention
        self._last_values: Tensor | None = None  # [rows, kv_heads, head_dim] of the last layer so far
        self.shared: dict[Any, Any] = {}  # buffers that all layers reuse, by keys of their users

    def sound(self) -> Tensor:  # [rows] bool
        """Whether each row is free of NaN and infinity; to be called after the pass.

        A NaN stays in its row through all layers, so the last layer's values show it. A later NaN affects no key or
        value, only the row's own logits, which are checked themselves.
        """
        if self._last_values is None:  # the model does not use this attention; the probe reports that
            return torch.ones(self.num_rows, dtype=torch.bool, device=self.store.device)
        return self._last_values.sum((1, 2), dtype=torch.float32).isfinite()

    def values_are(self, values: Tensor) -> None:
        """Record a layer's values [rows or more, kv_heads, head_dim], before or after they are computed."""
        self._last_values = values[: self.num_rows]

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
        """The attention of each row over its own text. Returns [padded rows, heads, head_dim]."""
        num_rows = self.num_rows
        key, value = key[:num_rows], value[:num_rows]
        output = query.new_empty(*query.shape[:2], value.shape[-1])
        output[num_rows:] = 0
        self.values_are(value)
        self.attention.attend(
            self.store,
            layer,
            query,
            key=key,
            value=value,
            output=output,
            scale=scale,
            window=window,
            softcap=softcap,
        )
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
    is_causal: bool | None = None,
    position_ids: Tensor | None = None,  # of no use: keys and queries have their positions already
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers. Returns [1, rows, heads, head_dim].

    Raises NotImplementedError, with the names, for arguments that would change the result and are not known here.
    """
    others |= {"attention_mask": attention_mask, "is_causal": is_causal is False}
    if unknown := [name for name, value in others.items() if not _is_empty(value)]:
        raise NotImplementedError(
            f"its attention depends on {', '.join(unknown)}, which packed attention does not know"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    query, key, value = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    output = packed_pass.attend(layer, query, key, value=value, scale=scale, window=sliding_window, softcap=softcap)
    return output[None], None


def _is_empty(value: Any) -> bool:
    """Whether an argument with this value, such as a dropout of 0, asks for nothing."""
    return value is None or (isinstance(value, (bool, int, float)) and not value)


AttentionInterface.register(ATTENTION, packed_attention)
