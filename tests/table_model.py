"""A model whose law is known: logits are a table of the last ``order`` tokens. It keeps "KV" in the real pool.

What a slot holds is its token, and a row's context is read back from its slots, so that a wrong slot, a wrong
rollback or a wrong ancestor changes the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.kv_cache import KvPool, SequenceCache
from specdec.model_runner import Segment
from specdec.rounds import ModelInfo


class TableRunner:
    """Stands in for specdec.model_runner.ModelRunner.

    ``sharpness`` scales random logits; ``blend`` mixes in another table of the same shape, which makes pairs of
    tunable agreement.
    """

    def __init__(
        self,
        vocab_size: int = 8,
        seed: int = 0,
        order: int = 2,
        sharpness: float = 1.5,
        context_length: int = 512,
        num_slots: int = 4096,
        blend: tuple[int, float] | None = None,
        name: str = "table",
    ) -> None:
        def table(seed: int) -> Tensor:
            generator = torch.Generator().manual_seed(seed)
            shape = (*(vocab_size + 1 for _ in range(order)), vocab_size)  # index vocab_size: before the beginning
            return torch.randn(shape, generator=generator) * sharpness

        self.table = table(seed)
        if blend is not None:
            other, weight = blend
            self.table = (1 - weight) * self.table + weight * table(other)
        self.order = order
        self.device = torch.device("cpu")
        self.pool = KvPool(num_slots, self.device)
        self.info = ModelInfo(name, f"{name}-{seed}-{blend}", vocab_size, "", context_length)
        self.num_passes = 0
        self._token_of_slot: dict[int, int] = {}

    def new_cache(self) -> SequenceCache:
        return SequenceCache(self.pool)

    def logits_after(self, prefix: Sequence[int]) -> Tensor:  # [vocab]
        padded = [self.info.vocab_size] * self.order + list(prefix)
        return self.table[tuple(padded[len(padded) - self.order :])]

    def forward(self, segments: Sequence[Segment]) -> list[Tensor]:
        self.num_passes += 1
        logits = []
        for segment in segments:
            context = [self._token_of_slot[slot] for slot in segment.context_slots]
            texts: list[list[int]] = []
            for token, parent, slot in zip(segment.token_ids, segment.parents, segment.row_slots, strict=True):
                self._token_of_slot[slot] = token
                texts.append([*(context if parent < 0 else texts[parent]), token])
            rows = [self.logits_after(texts[row]) for row in segment.logit_rows]
            logits.append(torch.stack(rows) if rows else torch.empty(0, self.info.vocab_size))
        return logits
