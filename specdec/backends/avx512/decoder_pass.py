"""A pass of a whole model in one call of decoder_pass.c, for models with embedding, common layers, RMS norm and head.

Knows the modules of one model; does not know architectures, or which models have this form
(``specdec.backends.avx512.one_call``). The arguments of the call live as long as the model: in a pass the processor's
caches are full of weights, so every new object costs several times as much as elsewhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch

from specdec.backends.avx512.coupled_draw import described
from specdec.backends.avx512.decoder_layer import DecoderLayer, Norm, Work
from specdec.backends.avx512.paged_attention import LANES, PagedAttention
from specdec.backends.avx512.tiled_linear import Linear, TiledLinear
from specdec.backends.packed_pass import PackedPass
from specdec.backends.taps import Taps
from specdec.passes.outputs import PassOutputs
from specdec.passes.rows import rounded

_POINTER = ctypes.c_void_p
_MIN_ROWS, _MIN_POSITIONS = 64, 1024
"""Least sizes of the buffers of rows and of angles."""


class _Ends(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("embedding", "cos", "sin")),
        ("norm", Norm),
        ("head", Linear),
        *((name, _POINTER) for name in ("token_ids", "positions", "logit_rows")),
        *((name, _POINTER) for name in ("features", "logits", "likeliest", "sound")),
        *((name, _POINTER) for name in ("tapped", "states")),
        *((name, ctypes.c_int32) for name in ("num_logit_rows", "num_tokens", "num_taps")),
    )


class _Further(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("last", "keys", "positions", "draws", "hurried", "tokens")),
        *((name, ctypes.c_int32) for name in ("num_passes", "num_chains", "num_done")),
    )


class DecoderPass:
    """See specdec.backends.base.ModelCall. One pass at a time."""

    def __init__(
        self,
        embedding: torch.nn.Embedding,
        rotary: torch.nn.Module,
        layers: DecoderLayer,
        norm: torch.nn.Module,
        head: TiledLinear,
        vocab_size: int,
        context_length: int,
    ) -> None:
        self.layers, self.head = layers, head
        self._embedding, self._num_embeddings = embedding.weight, len(embedding.weight)
        self._rotary, self._norm = rotary, norm  # keeps the memory alive that C points to
        self._vocab_size, self._context_length = vocab_size, context_length
        self._groups = layers.attention.heads // layers.attention.kv_heads
        self.decodes_further = self._groups <= LANES
        self._ends = _Ends(
            embedding=self._embedding.data_ptr(), norm=Norm.of(norm), head=head.described, num_tokens=vocab_size
        )
        self._num_positions = self._num_rows = 0
        self._taps: Taps | None = None
        self._yield_requested = ctypes.c_int32()

    def __call__(
        self, token_ids: Sequence[int], positions: Sequence[int], logit_rows: Sequence[int], packed_pass: PackedPass
    ) -> PassOutputs:
        if not 0 <= min(token_ids, default=0) <= max(token_ids, default=0) < self._num_embeddings:
            raise IndexError(f"a token id is not below {self._num_embeddings}")
        num_passes = packed_pass.rows.num_further if self.decodes_further else 0
        last_rows = packed_pass.rows.last_rows if num_passes else []
        num_rows, num_wanted, num_further = len(token_ids), len(logit_rows), num_passes * len(last_rows)
        self._have_rows(num_rows)
        self._have_positions(max(positions, default=0) + 1 + num_passes)
        numbers = np.array([*token_ids, *positions, *logit_rows], np.int32)
        features = np.empty((num_wanted + num_further, self.head.in_features), np.int16)  # bfloat16
        logits = np.empty((num_wanted + num_further, self.head.out_features), np.int16)
        likeliest = np.empty(num_wanted + num_further, np.int32)
        sound = np.empty(num_rows + num_further, np.bool_)
        ends, buffers = self._ends, self._buffers
        ends.token_ids = at = numbers.ctypes.data
        ends.positions, ends.logit_rows = at + 4 * num_rows, at + 8 * num_rows
        ends.features, ends.logits = features.ctypes.data, logits.ctypes.data
        ends.likeliest, ends.sound = likeliest.ctypes.data, sound.ctypes.data
        ends.num_logit_rows, buffers.num_rows = num_wanted, num_rows
        taps = self._taps if self._taps is not None and self._taps.is_open else None
        ends.num_taps = 0 if taps is None else len(self._tapped)
        if taps is not None:
            states = np.empty((len(self._tapped), num_rows, self.head.in_features), np.int16)  # bfloat16
            ends.tapped, ends.states = self._tapped.ctypes.data, states.ctypes.data
        if not num_passes:
            self.layers.compute(packed_pass, buffers, ends)
            if taps is not None:
                for boundary, rows in zip(self._tapped.tolist(), torch.from_numpy(states), strict=True):
                    taps.put(boundary, rows.view(torch.bfloat16))
            return PassOutputs(logits[:, : self._vocab_size], features, sound, likeliest.tolist())
        last = [logit_rows.index(row) for row in last_rows]
        starts = PagedAttention.of(packed_pass).for_groups(self._groups).starts
        chains = np.array([last, starts, [positions[row] + 1 for row in last_rows]], np.int32)
        at, size = chains.ctypes.data, chains.strides[0]
        draws, requested = described(packed_pass.rows.draws), ctypes.addressof(self._yield_requested)
        tokens = np.empty((num_passes, len(last)), np.int32)
        pointers = at, at + size, at + 2 * size, ctypes.addressof(draws), requested, tokens.ctypes.data
        further = _Further(*pointers, num_passes, len(last))
        self.layers.compute(packed_pass, buffers, ends, further)
        num_done = further.num_done
        end = num_wanted + num_done * len(last)
        sound = sound[: num_rows + num_done * len(last)]
        logits, features = logits[:end, : self._vocab_size], features[:end]
        return PassOutputs(logits, features, sound, likeliest[:end].tolist(), tokens[:num_done].T.tolist())

    def request_yield(self, requested: bool) -> None:
        self._yield_requested.value = requested

    def tap(self, boundaries: Sequence[int]) -> Taps:
        self._tapped = np.array(sorted(set(boundaries)), np.int32)
        self._taps = Taps(boundaries, self.layers.num_led)
        return self._taps

    def _have_rows(self, num_rows: int) -> None:
        if num_rows <= self._num_rows:
            return
        self._num_rows = rounded(num_rows, _MIN_ROWS)
        work = Work(self._num_rows, self.layers.sizes, self._embedding.dtype)
        rows = self._embedding.new_empty(self._num_rows, self.head.in_features)
        cos, sin = self._embedding.new_empty(2, self._num_rows, self.layers.attention.head_dim)
        self._buffers = work.buffers(rows, cos, sin)
        self._held = work, rows, cos, sin

    def _have_positions(self, num_positions: int) -> None:
        if num_positions <= self._num_positions:
            return
        # Some rotary embeddings change all angles once a position is beyond the context.
        self._num_positions = max(num_positions, min(self._context_length, max(_MIN_POSITIONS, 2 * num_positions)))
        positions = torch.arange(self._num_positions)
        self._cos, self._sin = self._rotary(self._embedding, position_ids=positions[None])
        self._ends.cos, self._ends.sin = self._cos.data_ptr(), self._sin.data_ptr()
