"""A whole model in one call, computed by decoder_pass.c, on CPUs with AVX512-BF16: where all layers are of the common
kind, and follow each other from the embedding to the head with nothing but an RMS norm around them.

Knows the modules of one model; refuses to know architectures, and which of their models are like that
(``specdec.model_call``). What is needed to call it lives as long as the model: a pass finds the processor's caches full
of weights, so that every object that is made for it costs several times what it does elsewhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.decoder_layer import DecoderLayer, Norm, Work
from specdec.packed_attention import PackedPass
from specdec.packed_rows import rounded
from specdec.tiled_linear import Linear, TiledLinear

_POINTER = ctypes.c_void_p
_FEWEST_ROWS, _FEWEST_POSITIONS = 64, 1024


class _Ends(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("embedding", "cos", "sin")),
        ("norm", Norm),
        ("head", Linear),
        *((name, _POINTER) for name in ("token_ids", "positions", "logit_rows", "features", "logits", "sound")),
        ("num_logit_rows", ctypes.c_int32),
    )


class DecoderPass:
    """See specdec.model_call.ModelCall. One pass at a time."""

    def __init__(
        self,
        embedding: torch.nn.Embedding,
        rotary: torch.nn.Module,
        layers: DecoderLayer,
        norm: torch.nn.Module,
        head: TiledLinear,
        context_length: int,
    ) -> None:
        self.layers, self.head = layers, head
        self._embedding = embedding.weight
        self._rotary, self._norm = rotary, norm  # what C points to is held here
        self._context_length = context_length
        self._ends = _Ends(embedding=self._embedding.data_ptr(), norm=Norm.of(norm), head=head.described)
        self._num_positions = self._num_rows = 0

    def __call__(
        self, token_ids: Sequence[int], positions: Sequence[int], logit_rows: Sequence[int], packed_pass: PackedPass
    ) -> tuple[Tensor, Tensor, Tensor]:
        if not 0 <= min(token_ids, default=0) <= max(token_ids, default=0) < len(self._embedding):
            raise IndexError(f"a token id is not below {len(self._embedding)}")
        num_rows, num_wanted = len(token_ids), len(logit_rows)
        self._have_rows(num_rows)
        self._have_positions(max(positions, default=0) + 1)
        numbers = np.array([*token_ids, *positions, *logit_rows], np.int32)
        features = self._embedding.new_empty(num_wanted, self.head.in_features)
        logits = self._embedding.new_empty(num_wanted, self.head.out_features)
        sound = torch.empty(num_rows, dtype=torch.bool)
        ends, buffers = self._ends, self._buffers
        ends.token_ids = at = numbers.ctypes.data
        ends.positions, ends.logit_rows = at + 4 * num_rows, at + 8 * num_rows
        ends.features, ends.logits, ends.sound = features.data_ptr(), logits.data_ptr(), sound.data_ptr()
        ends.num_logit_rows, buffers.num_rows = num_wanted, num_rows
        self.layers.compute(packed_pass, buffers, ends)
        return logits, features, sound

    def _have_rows(self, num_rows: int) -> None:
        if num_rows <= self._num_rows:
            return
        self._num_rows = rounded(num_rows, _FEWEST_ROWS)
        work = Work(self._num_rows, self.layers.sizes, self._embedding.dtype)
        rows = self._embedding.new_empty(self._num_rows, self.head.in_features)
        cos, sin = self._embedding.new_empty(2, self._num_rows, self.layers.attention.head_dim)
        self._buffers = work.buffers(rows, cos, sin)
        self._held = work, rows, cos, sin

    def _have_positions(self, num_positions: int) -> None:
        if num_positions <= self._num_positions:
            return
        # Beyond the context some encode all positions in another way.
        self._num_positions = max(num_positions, min(self._context_length, max(_FEWEST_POSITIONS, 2 * num_positions)))
        positions = torch.arange(self._num_positions)
        self._cos, self._sin = self._rotary(self._embedding, position_ids=positions[None])
        self._ends.cos, self._ends.sin = self._cos.data_ptr(), self._sin.data_ptr()
