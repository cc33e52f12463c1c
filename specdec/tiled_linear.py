"""Linear layers computed by tiled_linear.c, on CPUs with AVX512-BF16. The few rows of a decoding pass wait for the
weight to be read, which takes oneDNN 1.2 to 2 times as long (bench/LOG.md); many rows take it no less.

Knows one weight at a time; refuses to know models. The C file is compiled when the package is installed, where there
is a compiler; without it nothing here takes a weight.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor

_COLUMNS = 32  # outputs of a tile, as in tiled_linear.c
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class TiledLinear(torch.nn.Module):
    """In place of a ``torch.nn.Linear`` whose weight it ``takes``, for inference only.

    A row's bits do not depend on the number of rows or its place among them, also where there is just one.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        num_tiles = -(-self.out_features // _COLUMNS)
        # No buffers: what walks over buffers, such as ``Module.to``, would move them.
        self._tiles = weight.new_zeros(num_tiles, self.in_features // 2, _COLUMNS, 2)
        for number, outputs in enumerate(torch.split(weight.detach(), _COLUMNS)):
            self._tiles[number, :, : len(outputs)] = outputs.view(len(outputs), -1, 2).transpose(0, 1)
        self.nbytes = self._tiles.nbytes
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)
        self._float_bias = None if bias is None else bias.detach().float().contiguous()
        self._compute = _compiled()

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether this machine computes with such a weight, and faster so."""
        if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16 or weight.shape[1] % 2:
            return False
        return has_avx512_bf16() and _compiled() is not None

    @property
    def weight(self) -> Tensor:
        """A copy in the usual order, for the few model classes that look at it."""
        return self._tiles.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features].clone()

    def forward(self, inputs: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        rows = inputs.contiguous()
        outputs = rows.new_empty(*rows.shape[:-1], self.out_features)
        bias = self._float_bias
        assert self._compute is not None
        self._compute(
            self._tiles.data_ptr(),
            None if bias is None else bias.data_ptr(),
            rows.data_ptr(),
            outputs.data_ptr(),
            rows.numel() // self.in_features,
            self.out_features,
            self.in_features,
            torch.get_num_threads(),
        )
        return outputs

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


def has_avx512_bf16() -> bool:
    """And no AMX: that computes a prompt's many rows several times as fast, by way of oneDNN."""
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16")) and not capabilities.get("amx_bf16")


@functools.cache
def _compiled() -> Callable[..., None] | None:
    """``specdec_tiled_linear`` of the C file. It computes in the threads of torch's own OpenMP, which is there."""
    found = importlib.util.find_spec("specdec._tiled_linear")
    if found is None or found.origin is None:
        return None
    try:
        function = ctypes.CDLL(found.origin).specdec_tiled_linear
    except (OSError, AttributeError):  # compiled for another machine; a torch with another OpenMP
        return None
    function.argtypes = [_POINTER] * 4 + [_INT] * 4
    function.restype = None
    compute: Callable[..., None] = function
    return compute
