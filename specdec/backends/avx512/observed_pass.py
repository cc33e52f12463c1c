"""A test pass of short texts, which records how a model calls its attention. Does not know architectures."""

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

_TEXT_LENGTHS, _BLOCK_SIZE = (7, 3), 8
_MIN_EQUAL_SHARE = 0.9
"""Share of the numbers that must have equal bits. Both sides round alike; only the sums in the norms differ. The lowest
share seen of a correct layer is 0.98."""


class Inputs(NamedTuple):
    """Inputs of the test pass, by row. Most rows are logit rows, but not all."""

    token_ids: list[int]
    positions: list[int]
    logit_rows: list[int]


class ObservedPass(PackedPass):
    """A pass that records the last call of its attention."""

    def __init__(self, vocab_size: int, max_position: int, backend: Backend) -> None:
        pools = KvStore(BlockPool(len(_TEXT_LENGTHS), _BLOCK_SIZE), torch.device("cpu"))
        segments = [
            Segment(range(length), range(-1, length - 1), 0, [block], []) for block, length in enumerate(_TEXT_LENGTHS)
        ]
        rows = PassRows(segments, _BLOCK_SIZE)
        super().__init__(pools, rows, backend.attention(rows, _BLOCK_SIZE))
        # Positions over the model's whole range: some code treats distant positions in another way.
        stride = max(1, max_position // max(_TEXT_LENGTHS))
        num_rows = sum(_TEXT_LENGTHS)
        token_ids = [number % vocab_size for number in range(num_rows)]
        positions = [position * stride for position in self.rows.positions]
        self.inputs = Inputs(token_ids, positions, list(range(1, num_rows)))
        self.asked: AttentionSettings | None = None
        self._query: Tensor | None = None

    @classmethod
    def over(cls, model: PreTrainedModel, backend: Backend) -> ObservedPass:
        config = model.config.get_text_config()
        return cls(config.vocab_size, getattr(config, "max_position_embeddings", None) or 0, backend)

    @classmethod
    def near(cls, model: PreTrainedModel, backend: Backend) -> ObservedPass:
        """A test pass with consecutive positions."""
        return cls(model.config.get_text_config().vocab_size, 0, backend)

    def seen(self, of: AttentionSettings) -> tuple[Tensor, Tensor, Tensor]:
        """The last layer's queries, and the keys and values in its pool."""
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
    """Whether the results of a model's own code and of this backend are of the same computation."""
    return float((expected == computed).float().mean()) >= _MIN_EQUAL_SHARE
