"""Linear layers computed by oneDNN on a CPU, with weights packed in the order in which its kernels read them.

With the few rows of a decoding pass a matrix
product is limited by reading its weight. A packed weight is read about twice as fast as by
``torch.nn.functional.linear``.

An output row has the same bits for every number of rows and every index among them. Plain ``linear`` in float32 does
not guarantee this: see ``row_multiple``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.backends.linears import repacked, replace_linears

_ROWS_EXPECTED = 9
"""oneDNN chooses the order of a weight for this number of rows, and uses it for every number."""


class PackedLinear(torch.nn.Module):
    """Replaces a ``torch.nn.Linear`` on the CPU, for inference only. ``weight`` is [out_features, in_features].

    For a single row oneDNN uses a kernel with other last bits, so the row is computed twice. A runner that pads its
    passes, and their logit rows, to two rows saves the copy.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes
        # Not a buffer: functions over all buffers, such as ``Module.to``, cannot handle a packed tensor.
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS_EXPECTED)
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)

    @property
    def weight(self) -> Tensor:
        """A copy in the usual order, for the few model classes that read it."""
        return self._packed.to_dense()

    def forward(self, inputs: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        if inputs.numel() == self.in_features:
            return self._linear(inputs.expand(2, *inputs.shape))[0]
        return self._linear(inputs)

    def _linear(self, inputs: Tensor) -> Tensor:
        # For rows in another memory layout oneDNN uses yet another kernel.
        rows = inputs.contiguous()
        outputs: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self.bias, "none", [], "")
        return outputs

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def has_native_bfloat16() -> bool:
    """Whether the CPU computes in bfloat16. On other CPUs oneDNN emulates it, no faster than float32."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    capabilities = torch.cpu.get_capabilities()
    has_it = any(capabilities.get(name) for name in ("avx512_bf16", "amx_bf16", "avx_ne_convert", "bf16"))
    return has_it and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN computes with such a weight on this machine, and faster if it is packed."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return weight.dtype is torch.float32 or (weight.dtype is torch.bfloat16 and has_native_bfloat16())


def pack_linears(model: torch.nn.Module) -> None:
    """Replace every linear layer of ``model`` that can be packed, in place. Others do not change."""
    replace_linears(model, PackedLinear, can_pack)


def row_multiple(model: torch.nn.Module) -> int:
    """The multiple to which a pass's rows and logit rows must be padded, so that no bit depends on their number."""
    if repacked(model):
        return 2
    # Plain float32 linear on the CPU: 1 to 3, 5 to 7 and, with two threads, 9 to 11 rows differ from 4 in last bits.
    return 4 if any(parameter.dtype is torch.float32 for parameter in model.parameters()) else 2


def min_rows(model: torch.nn.Module) -> int:
    """The number of rows and logit rows to pad a pass to for speed: oneDNN's AVX-512 kernels read a packed weight
    faster for four rows than for two (bench/LOG.md, 2026-11-22). No bit depends on it."""
    by_onednn = any(isinstance(layer, PackedLinear) for layer in model.modules())
    return 4 if by_onednn and torch.backends.cpu.get_cpu_capability() == "AVX512" else 1
