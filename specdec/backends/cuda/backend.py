"""The backend for GPUs. Chosen by name alone until it is measured; on a CPU it computes the same passes, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.backends.base import Backend
from specdec.backends.common_layer import CommonLayer, replace_layers
from specdec.backends.cuda.attention import PlannedAttention
from specdec.backends.cuda.launches import draw_by_kernels
from specdec.backends.cuda.memory import PassMemory
from specdec.backends.cuda.plan import kernel_draws
from specdec.backends.cuda.static_pass import StaticPass
from specdec.core.device import indices, numbers
from specdec.core.sequence import Draw, SamplingParams
from specdec.passes.rows import PassRows

_VERSION = 1
"""Version of the kernels' bits; to be raised with every change of a result."""


class CudaBackend:
    """See specdec.backends.base.Backend. ``torch_backend`` draws with filters, and packs weights on a CPU."""

    name = "cuda"

    def __init__(self, torch_backend: Backend) -> None:
        self._torch = torch_backend
        self.device = torch_backend.device
        self.logits_per_call = torch_backend.logits_per_call
        compiler = f"triton {version('triton')}, " if self.device.type == "cuda" else ""
        self.fingerprint = f"cuda {_VERSION}, {compiler}{torch_backend.fingerprint}"

    @staticmethod
    def why_not(device: torch.device) -> str | None:
        """The reason why this backend cannot compute on this device; None if it can."""
        if device.type == "cpu":
            return None
        if device.type != "cuda":
            return f"it computes on GPUs of NVIDIA, not on {device}"
        return None if find_spec("triton") is not None else "it needs triton (the extra gpu of specdec)"

    def take(self, model: PreTrainedModel, vocab_size: int, context_length: int) -> StaticPass:
        replace_layers(model, self)
        self._torch.pack(model)
        return StaticPass(model, vocab_size, self.draw_pass)

    def pack(self, module: torch.nn.Module) -> None:
        self._torch.pack(module)

    def attention(self, rows: PassRows, block_size: int) -> PlannedAttention:
        return PlannedAttention(self.device, block_size, rows)

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        if self._torch_draws(draws):
            return self._torch.draw(logits, draws)
        return draw_by_kernels(logits, self._described(draws))[0][:, 0].long()

    def leaders(
        self, logits: Tensor, draws: Sequence[Draw], count: int, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        if self.device.type == "cpu" or ids is not None:
            return self._torch.leaders(logits, draws, count, ids)
        tokens, scores = draw_by_kernels(logits, self._described(draws), min(count, logits.shape[-1]))
        return tokens.long(), scores

    def report(self, model: PreTrainedModel) -> dict[str, int]:
        num_common = sum(type(module) is CommonLayer for module in model.modules())
        return {"common_layers": num_common} | self._torch.report(model)

    def _torch_draws(self, draws: Sequence[Draw]) -> bool:
        return self.device.type == "cpu" or not all(map(kernel_draws, draws))

    def _described(self, draws: Sequence[Draw]) -> tuple[Tensor, Tensor, Tensor]:
        """Seeds, positions and temperatures [rows] on the device."""
        seeds = indices([draw.seed - (draw.seed >> 63 << 64) for draw in draws], self.device)
        positions = indices([draw.position for draw in draws], self.device)
        return seeds, positions, numbers([draw.sampling.temperature for draw in draws], self.device)

    def draw_pass(self, logits: Tensor, memory: PassMemory) -> Tensor:  # [rows, vocab] -> [rows] int32
        """The draws in ``memory``, whether the pass is captured or not."""
        described = memory["seeds"], memory["draw_positions"], memory["temperatures"]
        if self.device.type != "cpu":
            return draw_by_kernels(logits, described)[0][:, 0]
        draws = [
            Draw(SamplingParams(temperature), seed % 2**64, position)
            for seed, position, temperature in zip(*(section.tolist() for section in described), strict=True)
        ]
        return self._torch.draw(logits, draws).int()
