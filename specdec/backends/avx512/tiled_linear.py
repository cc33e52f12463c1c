"""Linear layers computed by tiled_linear.c. With the few rows of a decoding pass, the time is that of reading the
weight; oneDNN takes 1.2 to 2 times as long, and is not faster with many rows (bench/LOG.md, 2026-11-25).

Knows one weight at a time; does not know models.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import torch
from torch import Tensor

from specdec.backends.avx512.kernels import kernel

COLUMNS = 32  # outputs of a tile, as in tiled_linear.c


class Linear(ctypes.Structure):
    """The C structure of a weight."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weight", "bias")),
        *((name, ctypes.c_int32) for name in ("out_features", "in_features")),
    )


class TiledLinear(torch.nn.Module):
    """Replaces a ``torch.nn.Linear`` with a weight that it ``takes``, for inference only.

    A row's bits do not depend on the number of rows (one included) or on its place among them.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        num_tiles = -(-self.out_features // COLUMNS)
        # Not a buffer: functions over all buffers, such as ``Module.to``, would move it.
        self._tiles = weight.new_zeros(num_tiles, self.in_features // 2, COLUMNS, 2)
        for number, outputs in enumerate(torch.split(weight.detach(), COLUMNS)):
            self._tiles[number, :, : len(outputs)] = outputs.view(len(outputs), -1, 2).transpose(0, 1)
        self.nbytes = self._tiles.nbytes
        self.bias = None if bias is None else torch.nn.Parameter(bias.detach(), requires_grad=False)
        self._float_bias = None if bias is None else bias.detach().float().contiguous()
        bias_pointer = None if self._float_bias is None else self._float_bias.data_ptr()
        self.described = Linear(self._tiles.data_ptr(), bias_pointer, self.out_features, self.in_features)
        self._compute = _compute()

    @staticmethod
    def takes(weight: Tensor) -> bool:
        """Whether tiled_linear.c computes with such a weight on this machine, and faster than oneDNN."""
        if weight.device.type != "cpu" or weight.dtype is not torch.bfloat16 or weight.shape[1] % 2:
            return False
        return _compute() is not None

    @property
    def weight(self) -> Tensor:
        """A copy in the usual order, for the few model classes that read it."""
        return self._tiles.transpose(1, 2).reshape(-1, self.in_features)[: self.out_features].clone()

    def forward(self, inputs: Tensor) -> Tensor:  # [..., in_features] -> [..., out_features]
        if inputs.shape[-1] != self.in_features:
            raise ValueError(f"rows of {inputs.shape[-1]} numbers, where the weight takes {self.in_features}")
        rows = inputs.contiguous()
        outputs = rows.new_empty(*rows.shape[:-1], self.out_features)
        assert self._compute is not None
        num_rows = rows.numel() // self.in_features
        pointers = ctypes.byref(self.described), rows.data_ptr(), outputs.data_ptr()
        if not self._compute(*pointers, num_rows, torch.get_num_threads()):
            raise MemoryError("there is no memory for the buffers that the threads of a product share")
        return outputs

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


@functools.cache
def _compute() -> Callable[..., int] | None:
    return kernel("tiled_linear", *[ctypes.c_void_p] * 3, *[ctypes.c_int] * 2)
