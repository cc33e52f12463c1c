"""The backend for every device: torch's kernels, with oneDNN's packed weights on a CPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.backends.base import BYTES_PER_LOGIT
from specdec.backends.linears import is_linear
from specdec.backends.torch.draw import TorchDraw
from specdec.backends.torch.gathered_attention import GatheredAttention
from specdec.backends.torch.model_code import ModelCode
from specdec.backends.torch.onednn_linear import PackedLinear, pack_linears
from specdec.core.sequence import Draw
from specdec.passes.rows import PassRows
from specdec.sampling.ranking import ranked

_CPU_LOGITS_PER_CALL = 1 << 18
"""Rows times vocabulary, 2 MiB in float64: more would not fit into the processor's cache."""

_FREE_MEMORY_SHARE = 1 / 16
"""Share of a GPU's free memory for one call: fewer calls mean fewer kernels that wait for each other."""


class TorchBackend:
    """See specdec.backends.base.Backend."""

    name = "torch"

    def __init__(self, device: torch.device, logits_per_call: int | None = None) -> None:
        """``logits_per_call``: see Backend; None: the default for the device."""
        self.device = device
        self.fingerprint = f"torch {torch.__version__}, {_hardware(device)}"
        self.logits_per_call = logits_per_call or _logits_per_call(device)
        self._draw = TorchDraw(self.logits_per_call)

    def take(self, model: PreTrainedModel, vocab_size: int, context_length: int) -> ModelCode:
        pack_linears(model)
        return ModelCode(model, vocab_size)

    def pack(self, module: torch.nn.Module) -> None:
        pack_linears(module)

    def attention(self, rows: PassRows, block_size: int) -> GatheredAttention:
        return GatheredAttention(rows, block_size, self.device)

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:
        return self._draw.draw(logits, draws)

    def leaders(
        self, logits: Tensor, draws: Sequence[Draw], count: int, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        return self._draw.leaders(logits, draws, count) if ids is None else ranked(logits, draws, count, ids)

    def report(self, model: PreTrainedModel) -> dict[str, int]:
        modules = list(model.modules())
        return {
            "linear_layers_by_onednn": sum(type(module) is PackedLinear for module in modules),
            "linear_layers_by_torch": sum(map(is_linear, modules)),
        }


def _logits_per_call(device: torch.device) -> int:
    if device.type != "cuda":
        return _CPU_LOGITS_PER_CALL
    free, _ = torch.cuda.mem_get_info(device)
    return max(_CPU_LOGITS_PER_CALL, int(free * _FREE_MEMORY_SHARE) // BYTES_PER_LOGIT)


def _hardware(device: torch.device) -> str:
    """The properties of the hardware that decide torch's choice of kernels, as text."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return device.type
    capabilities = torch.cpu.get_capabilities()
    kinds = sorted(name for name, value in capabilities.items() if value is True)
    return " ".join([str(capabilities.get("architecture", "")), torch.backends.cpu.get_cpu_capability(), *kinds])
