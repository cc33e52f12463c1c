"""The backend for CPUs with AVX512-BF16: C kernels for bfloat16 weights, and for draws.

The torch backend computes the rest, such as float32 weights, capped scores or unusual layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.backends.avx512 import coupled_draw, kernels
from specdec.backends.avx512.decoder_layer import DecoderLayer
from specdec.backends.avx512.fused_layers import fuse_layers
from specdec.backends.avx512.one_call import in_one_call
from specdec.backends.avx512.paged_attention import PagedAttention
from specdec.backends.avx512.side_layer import FusedSideLayer
from specdec.backends.avx512.tiled_linear import TiledLinear
from specdec.backends.base import Backend, ModelCall
from specdec.backends.linears import replace_linears
from specdec.backends.side_layer import SideLayer
from specdec.core.sequence import Draw, SamplingParams
from specdec.passes.rows import PassRows

_VERSION = 1
"""Version of the kernels' bits; to be raised with every change of a result."""


class Avx512Backend:
    """See specdec.backends.base.Backend. ``torch_backend`` computes the rest."""

    name = "avx512"

    def __init__(self, torch_backend: Backend) -> None:
        self._torch = torch_backend
        self.device = torch_backend.device
        self.logits_per_call = torch_backend.logits_per_call
        self.fingerprint = f"avx512 {_VERSION}, {torch_backend.fingerprint}"

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        """The reason why this backend cannot compute on this device; None if it can."""
        return f"it computes on the CPU, not on {device}" if device.type != "cpu" else kernels.why_not()

    def take(self, model: PreTrainedModel, vocab_size: int, context_length: int) -> ModelCall:
        replace_linears(model, TiledLinear, TiledLinear.takes)
        own = self._torch.take(model, vocab_size, context_length)
        fuse_layers(model, self)
        return in_one_call(model, own, self, vocab_size, context_length) or own

    def pack(self, module: torch.nn.Module) -> None:
        replace_linears(module, TiledLinear, TiledLinear.takes)
        for parent in list(module.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, SideLayer) and FusedSideLayer.takes(child):
                    setattr(parent, name, FusedSideLayer(child))
        self._torch.pack(module)

    def attention(self, rows: PassRows, block_size: int) -> PagedAttention:
        return PagedAttention(rows, self._torch.attention(rows, block_size))

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        if not coupled_draw.takes(logits):
            return self._torch.draw(logits, draws)
        return coupled_draw.coupled_draw(logits, draws)

    def leaders(
        self, logits: Tensor, draws: Sequence[Draw], count: int, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if not coupled_draw.takes(logits):
            return self._torch.leaders(logits, draws, count, ids)
        unfiltered = [Draw(SamplingParams(sampling.temperature), seed, position) for sampling, seed, position in draws]
        count = min(count, logits.shape[-1])
        if ids is not None and all(draw.sampling.greedy for draw in draws):
            tokens, scores = coupled_draw.leaders(logits, unfiltered, count)
            return ids[tokens], scores
        if ids is not None:  # the noise is that of the whole vocabulary
            logits = logits.new_full((len(logits), 1 + int(ids.max())), -torch.inf).index_copy_(1, ids, logits)
        return coupled_draw.leaders(logits, unfiltered, count)

    def report(self, model: PreTrainedModel) -> dict[str, int]:
        kinds = {"decoder_layers_in_one_call": DecoderLayer, "linear_layers_in_tiles": TiledLinear}
        counts = {name: sum(type(module) is kind for module in model.modules()) for name, kind in kinds.items()}
        return counts | self._torch.report(model)
