"""A Hugging Face causal LM over packed rows: rows of many sequences in one pass, without padding.

The attention function is registered with transformers and receives the pass as an extra keyword argument, so the model
classes need no changes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from specdec.backends.base import Backend
from specdec.backends.packed_pass import ATTENTION, PackedPass
from specdec.backends.taps import Taps
from specdec.core.rounds import ModelInfo
from specdec.kvcache.block_pool import BlockPool, Move, SequenceCache
from specdec.kvcache.store import KvStore
from specdec.passes.outputs import RowOutputs, of_segments
from specdec.passes.prefill import MIN_ROWS, Chunk
from specdec.passes.rows import PassRows, Segment
from specdec.sampling.grammar import Grammars


class ModelRunner:
    """A loaded model and its KV pool of at least ``num_slots`` tokens."""

    def __init__(
        self, model: PreTrainedModel, info: ModelInfo, num_slots: int, backend: Backend, block_size: int = 16
    ) -> None:
        model.train(False)
        self.model: PreTrainedModel = torch.nn.Module.to(model, backend.device)  # transformers hides the signature
        self.model.set_attn_implementation(ATTENTION)
        self.info = info
        self.backend = backend
        self.chunk = Chunk()
        self.grammars: Grammars | None = None
        """Of a model that has a tokenizer and end tokens."""
        self.pool = BlockPool(-(-num_slots // block_size), block_size)
        self._store = KvStore(self.pool, backend.device)
        self._call = backend.take(self.model, info.vocab_size, info.context_length)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot of the KV pool; known after a pass."""
        return self._store.bytes_per_slot

    def resize(self, num_slots: int) -> None:
        """Replace the pool by one of at least ``num_slots`` tokens. There must be no sequences."""
        self.pool = BlockPool(-(-num_slots // self.pool.block_size), self.pool.block_size)
        self._store = self._store.resized(self.pool)

    def measure_chunk(self) -> None:
        """Find the chunk limit by small passes, because a full one may keep a slow device busy for minutes."""
        self.chunk = Chunk(MIN_ROWS)
        cache = self.new_cache()
        cache.take(MIN_ROWS)
        for _ in range(2):  # the first one also prepares kernels
            self.chunk.rows = MIN_ROWS
            self.forward([Segment.chain([0] * MIN_ROWS, 0, list(cache.block_table))])
        cache.release()

    def new_cache(self, salt: bytes = b"") -> SequenceCache:
        """An empty cache for a sequence. Sequences with different salts never share cached blocks."""
        return SequenceCache(self.pool, salt)

    def move(self, moves: Sequence[Move]) -> None:
        """Execute the moves of ``SequenceCache.keep`` and ``attach``; required before the next pass."""
        self._store.move(moves)

    @property
    def decodes_further(self) -> bool:
        """Whether a pass can decode further rows: see specdec.passes.rows.Segment."""
        return self._call.decodes_further

    def tap(self, boundaries: Sequence[int]) -> Taps:
        """See specdec.backends.base.ModelCall."""
        return self._call.tap(boundaries)

    def request_yield(self, requested: bool) -> None:
        """See specdec.backends.base.ModelCall."""
        self._call.request_yield(requested)

    def packed_pass(self, segments: Sequence[Segment]) -> PackedPass:
        """What attention needs for the rows of ``segments``, in this model or in a head of it."""
        rows = PassRows(segments, self.pool.block_size)
        return PackedPass(self._store, rows, self.backend.attention(rows, self.pool.block_size))

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> list[RowOutputs]:
        """One pass over the rows of all ``segments``. Stores the rows' keys and values in the segments' blocks."""
        started = time.perf_counter()
        packed_pass = self.packed_pass(segments)
        rows = packed_pass.rows
        token_ids: list[int] = []
        wanted: list[int] = []
        for segment in segments:
            wanted.extend(len(token_ids) + row - segment.num_kept for row in segment.logit_rows)
            token_ids.extend(segment.token_ids)
        outputs = self._call(token_ids, rows.positions, wanted, packed_pass=packed_pass)
        if not rows.num_further:
            self.chunk.observe(len(token_ids), time.perf_counter() - started)
        num_rows = [len(segment.token_ids) for segment in segments]
        return of_segments(outputs, num_rows, [len(segment.logit_rows) for segment in segments])
