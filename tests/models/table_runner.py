"""A model whose law is known: logits are a table of the last ``order`` tokens. It keeps "KV" in the real pool.

What a slot holds is its token, and a row's context is read back from its slots, so that a wrong slot, a wrong
rollback or a wrong ancestor changes the logits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.rounds import ModelInfo
from specdec.core.sequence import Draw
from specdec.kvcache.block_pool import BlockPool, Move, SequenceCache
from specdec.passes.outputs import PassOutputs, RowOutputs
from specdec.passes.prefill import Chunk
from specdec.passes.rows import PassRows, Segment
from tests.models.backends import backend


class TableRunner:
    """Stands in for specdec.runner.model_runner.ModelRunner.

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
        block_size: int = 1,
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
        self.backend = backend()
        self.chunk = Chunk()
        self.pool = BlockPool(num_slots // block_size, block_size)
        self.info = ModelInfo(name, f"{name}-{seed}-{blend}", vocab_size, "", context_length)
        self.num_passes = self.num_further_passes = 0
        self.requested, self.decodes_further = False, True
        self._token_of_slot: dict[int, int] = {}

    def new_cache(self, salt: bytes = b"") -> SequenceCache:
        return SequenceCache(self.pool, salt)

    def move(self, moves: Sequence[Move]) -> None:
        moved = {move.target: self._token_of_slot[move.source] for move in moves}
        self._token_of_slot.update(moved)

    def logits_after(self, prefix: Sequence[int]) -> Tensor:  # [vocab]
        padded = [self.info.vocab_size] * self.order + list(prefix)
        return self.table[tuple(padded[len(padded) - self.order :])]

    def greedy_text(self, prefix: Sequence[int], length: int) -> list[int]:
        """The most likely continuation."""
        ids = list(prefix)
        for _ in range(length):
            ids.append(int(self.logits_after(ids).argmax()))
        return ids[len(prefix) :]

    def forward(self, segments: Sequence[Segment]) -> list[RowOutputs]:
        self.num_passes += 1
        texts = [self._fed(segment) for segment in segments]
        rows = [
            [self.logits_after(of[row]) for row in each.logit_rows] for of, each in zip(texts, segments, strict=True)
        ]
        further: list[list[int]] = [[] for _ in segments]
        for _ in range(PassRows(segments, self.pool.block_size).num_further):
            if self.requested:
                break
            self.num_further_passes += 1
            for segment, of, logits, tokens in zip(segments, texts, rows, further, strict=True):
                tokens.append(self._drawn(logits[-1], segment.draw, len(tokens)))
                of.append([*of[-1], tokens[-1]])
                self._token_of_slot[self._slot(segment, len(of[-1]) - 1)] = tokens[-1]
                logits.append(self.logits_after(of[-1]))
        outputs = []
        for segment, some, tokens in zip(segments, rows, further, strict=True):
            logits = torch.stack(some) if some else torch.empty(0, self.info.vocab_size)
            sound = torch.ones(len(segment.token_ids) + len(tokens), dtype=torch.bool)
            outputs.append(PassOutputs(logits, logits, sound, logits.argmax(-1).tolist(), [tokens]).as_one())
        return outputs

    def _fed(self, segment: Segment) -> list[list[int]]:
        """The texts of the segment's rows."""
        context = [self._token_of_slot[self._slot(segment, p)] for p in range(segment.num_context)]
        texts: list[list[int]] = []
        for row, parent in enumerate(segment.parents):
            slot = self._slot(segment, segment.num_context + row)
            if row >= segment.num_kept:
                self._token_of_slot[slot] = segment.token_ids[row - segment.num_kept]
            texts.append([*(context if parent < 0 else texts[parent]), self._token_of_slot[slot]])
        return texts

    def _drawn(self, logits: Tensor, draw: Draw | None, number: int) -> int:
        if draw is None:
            return int(logits.argmax())
        return int(self.backend.draw(logits[None], [draw._replace(position=draw.position + number)]))

    def request_yield(self, requested: bool) -> None:
        self.requested = requested

    def _slot(self, segment: Segment, position: int) -> int:
        block, offset = divmod(position, self.pool.block_size)
        return segment.block_table[block] * self.pool.block_size + offset
