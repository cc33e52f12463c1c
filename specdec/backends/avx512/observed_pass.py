"""A pass of some short texts that is made to see what a model does in it. Knows a pool of its own, and what the
attention is asked.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.backends.avx512 import paged_attention
from specdec.backends.avx512.decoder_layer import AttentionSettings
from specdec.backends.base import Backend
from specdec.backends.packed_pass import PackedPass
from specdec.kvcache.block_pool import BlockPool
from specdec.kvcache.store import KvStore
from specdec.passes.rows import PassRows, Segment

_LENGTHS, _BLOCK = (7, 3), 8
"""Of the texts."""
_EQUAL = 0.9
"""Share of the numbers that must be the same to the last bit. Both sides round alike, and sum differently in the norms
only: 98 in 100 is the least that was seen of a layer that is taken rightly."""


class Inputs(NamedTuple):
    """Of a pass, by row. Of most rows, not of all, the logits are wanted."""

    token_ids: list[int]
    positions: list[int]
    logit_rows: list[int]


class ObservedPass(PackedPass):
    """Remembers what its attention was asked last."""

    def __init__(self, vocab_size: int, max_position: int, backend: Backend) -> None:
        pools = KvStore(BlockPool(len(_LENGTHS), _BLOCK), torch.device("cpu"))
        segments = [
            Segment(range(length), range(-1, length - 1), 0, [block], []) for block, length in enumerate(_LENGTHS)
        ]
        rows = PassRows(segments, _BLOCK)
        super().__init__(pools, rows, backend.attention(rows, _BLOCK))
        # From the first to the last that the model knows: some code treats far ones in another way.
        apart = max(1, max_position // max(_LENGTHS))
        num_rows = sum(_LENGTHS)
        token_ids = [number % vocab_size for number in range(num_rows)]
        positions = [position * apart for position in self.rows.positions]
        self.inputs = Inputs(token_ids, positions, list(range(1, num_rows)))
        self.asked: AttentionSettings | None = None
        self._query: Tensor | None = None

    @classmethod
    def over(cls, model: PreTrainedModel, backend: Backend) -> ObservedPass:
        config = model.config.get_text_config()
        return cls(config.vocab_size, getattr(config, "max_position_embeddings", None) or 0, backend)

    @classmethod
    def near(cls, model: PreTrainedModel, backend: Backend) -> ObservedPass:
        """With neighbouring positions."""
        return cls(model.config.get_text_config().vocab_size, 0, backend)

    def seen(self, of: AttentionSettings) -> tuple[Tensor, Tensor, Tensor]:
        """Of the layer that came last: queries, and its pool's keys and values."""
        like = torch.empty(0, of.kv_heads, of.head_dim, dtype=torch.bfloat16)
        [query] = [work.query for work in self.shared.values()] or [self._query]
        return query, *self.store.layer(of.layer, like, like)

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


def agree(expected: Tensor, computed: Tensor) -> bool:
    """Whether these are of the same computation, one by a model's own code and one by ours."""
    return float((expected == computed).float().mean()) >= _EQUAL
