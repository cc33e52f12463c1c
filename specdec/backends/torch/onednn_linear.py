"""Linear layers whose weights lie in the order in which a CPU's kernels read them: oneDNN's, or our own.

Knows one weight at a time; refuses to know models beyond their modules. At the few rows of a decoding pass a matrix
product waits for its weight: packed once at load it is read about twice as fast as by ``torch.nn.functional.linear``.

What it gives a pass: an output row has the same bits however many rows there are and wherever it stands among them.
(Plain ``linear`` is not like that in float32: see ``row_multiple``.)
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.pytorch_utils import Conv1D

from specdec.backends.avx512.tiled_linear import TiledLinear

_ROWS_EXPECTED = 9
"""oneDNN picks the order of a weight for a number of rows and keeps to it for any."""


class PackedLinear(torch.nn.Module):
    """In place of a ``torch.nn.Linear`` on the CPU, computed by oneDNN. ``weight`` is [out_features, in_features], for
    inference only.

    A single row takes a kernel of its own with other last bits, so it is computed twice; a runner that pads its
    passes to two rows, those of the logits as well, saves the copy.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes
        # No buffer: what walks over buffers, such as ``Module.to``, cannot handle a packed tensor.
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_EXPECTED)
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """A copy in the usual order, for the few model classes that look at it."""
        return self._packed.to_dense()

    def forward(self, inputs: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        if inputs.numel() == self.in_features:
            return self._linear(inputs.expand(2, *inputs.shape))[0]
        return self._linear(inputs)

    def _linear(self, inputs: Tensor) -> Tensor:
        # Rows that lie otherwise in memory take yet another kernel.
        rows = inputs.contiguous()
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return outputs

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def has_native_bfloat16() -> bool:
    """Whether the CPU computes in bfloat16; oneDNN emulates it on others, no faster than float32."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    capabilities = torch.cpu.get_capabilities()
    has_it = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"))
    return has_it and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN computes with such a weight on this machine, and faster for its being packed."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and has_native_bfloat16())


def pack_linears(model: torch.nn.Module) -> None:
    """Replace every linear layer of ``model`` that can be packed, in place. Others stay as they are.

    A weight is freed as soon as its layer is packed, unless something else uses it, such as a tied embedding.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if _is_linear(child):
                setattr(parent, name, _packed(child))


def row_multiple(model: torch.nn.Module) -> int:
    """What a pass's rows, and those of its logits, must be padded to a multiple of, so that no bit depends on it."""
    if _packed_layers(model):
        return 2
    # Plain float32 linear on the CPU: 1 to 3, 5 to 7 and, with two threads, 9 to 11 rows have other last bits than 4.
    return 4 if any(parameter.dtype is torch.float32 for parameter in model.parameters()) else 2


def least_rows(model: torch.nn.Module) -> int:
    """Rows that a pass, and its logits, had better have: oneDNN's AVX-512 kernels read a packed weight faster for four
    of them than for two (bench/LOG.md). No bit depends on it."""
    by_onednn = any(isinstance(layer, PackedLinear) for layer in _packed_layers(model))
    return 4 if by_onednn and torch.backends.cpu.get_cpu_capability() == "AVX512" else 1


def weight_bytes(model: torch.nn.Module) -> int:
    """Memory that the weights of ``model`` take, packed ones included."""
    tensors = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
    return tensors + sum(layer.nbytes for layer in _packed_layers(model))


def report(model: torch.nn.Module) -> dict[str, int]:
    """How many linear layers of ``model`` are computed by whom, for the log."""
    kinds = {"linear_layers_in_tiles": TiledLinear, "linear_layers_by_onednn": PackedLinear}
    counts = {name: sum(type(layer) is kind for layer in _packed_layers(model)) for name, kind in kinds.items()}
    return counts | {"linear_layers_by_torch": sum(map(_is_linear, model.modules()))}


def _packed(layer: torch.nn.Module) -> torch.nn.Module:
    weight: Tensor = layer.weight.t() if isinstance(layer, Conv1D) else layer.weight  # type: ignore
    bias: Tensor | None = layer.bias  # type: ignore[assignment]
    if TiledLinear.takes(weight):
        return TiledLinear(weight, bias)
    return PackedLinear(weight, bias) if can_pack(weight) else layer


def _packed_layers(model: torch.nn.Module) -> list[TiledLinear | PackedLinear]:
    return [module for module in model.modules() if isinstance(module, (TiledLinear, PackedLinear))]


def _is_linear(module: torch.nn.Module) -> bool:
    """Also a subclass, unless it computes something else."""
    return type(module).forward in (torch.nn.Linear.forward, Conv1D.forward)
