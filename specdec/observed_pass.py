"""A pass of some short texts that is made to see what a model does in it. Knows a pool of its own, and what the
attention is asked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec import paged_attention
from specdec.decoder_layer import AttentionSettings
from specdec.kv_cache import BlockPool
from specdec.kv_store import KvStore
from specdec.packed_attention import PackedPass
from specdec.packed_rows import Segment

_LENGTHS, _BLOCK = (7, 3), 8
"""Of the texts."""


class Inputs(NamedTuple):
    """Of a pass, [rows] each. Of most rows, not of all, the logits are wanted."""

    token_ids: Tensor
    positions: Tensor
    logit_rows: Tensor


class ObservedPass(PackedPass):
    """Remembers what its attention was asked last."""

    def __init__(self, vocab_size: int, max_position: int) -> None:
        self._pools = KvStore(BlockPool(len(_LENGTHS), _BLOCK), torch.device("cpu"))
        segments = [
            Segment(range(length), range(-1, length - 1), 0, [block], []) for block, length in enumerate(_LENGTHS)
        ]
        super().__init__(self._pools, segments, _BLOCK, torch.device("cpu"))
        # From the first to the last that the model knows: some code treats far ones in another way.
        apart = max(1, max_position // max(_LENGTHS))
        num_rows = sum(_LENGTHS)
        self.inputs = Inputs(
            torch.arange(num_rows) % vocab_size, torch.tensor(self.rows.positions) * apart, torch.arange(1, num_rows)
        )
        self.asked: AttentionSettings | None = None
        self._query: Tensor | None = None

    @classmethod
    def over(cls, model: PreTrainedModel) -> ObservedPass:
        config = model.config.get_text_config()
        return cls(config.vocab_size, getattr(config, "max_position_embeddings", None) or 0)

    def seen(self, of: AttentionSettings) -> tuple[Tensor, Tensor, Tensor]:
        """Of the layer that came last: queries, and its pool's keys and values."""
        like = torch.empty(0, of.kv_heads, of.head_dim, dtype=torch.bfloat16)
        [query] = [work.query for work in self.shared.values()] or [self._query]
        return query, *self._pools.layer(of.layer, like, like)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        usual = softcap is None and paged_attention.takes(query, key, value)
        settings = AttentionSettings(layer, query.shape[1], key.shape[1], query.shape[2], scale, window)
        self.asked = settings if usual else None
        self._query = query
        return super().attend(layer, query, key, value, scale, window, softcap)
