"""The coupled draw (``specdec.sampling.distributions.sample_coupled``) of all rows in one call of coupled_draw.c.

With torch a row of a large vocabulary takes several milliseconds, more than a draft step. The tokens are the same
except for the last bits of a logarithm, and of a sum where tied tokens reach top_p exactly.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.backends.avx512.kernels import kernel
from specdec.core.noise import Domain, check_position
from specdec.core.sequence import Draw


class _Draw(ctypes.Structure):
    _fields_ = (
        ("seed", ctypes.c_uint64),
        *((name, ctypes.c_uint32) for name in ("position", "domain")),
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p")),
        ("top_k", ctypes.c_int32),
    )

    @classmethod
    def of(cls, draw: Draw) -> _Draw:
        sampling, seed, position = draw
        check_position(position)  # ctypes would take it for another one
        filters = sampling.top_p, sampling.min_p, sampling.top_k
        return cls(seed, position, Domain.COUPLED, sampling.temperature, *filters)


def takes(logits: Tensor) -> bool:
    """Whether coupled_draw.c can draw from such rows on this machine."""
    usual = logits.dtype in (torch.bfloat16, torch.float32) and logits.device.type == "cpu"
    return usual and logits.dim() == 2 and logits.stride(1) == 1 and _compute() is not None


def described(draws: Sequence[Draw]) -> ctypes.Array[_Draw]:
    """``draws`` as C structures."""
    return (_Draw * len(draws))(*map(_Draw.of, draws))


def coupled_draw(logits: Tensor, draws: Sequence[Draw]) -> Tensor:  # [rows, vocab] -> [rows] int64
    """The token that each draw selects from its row. ``draws`` has one entry per row. Raises MemoryError."""
    return leaders(logits, draws, 1)[0][:, 0]


def leaders(logits: Tensor, draws: Sequence[Draw], count: int) -> tuple[Tensor, Tensor]:  # [rows, count] each
    """The leading tokens in the race of each row [rows, vocab], the drawn token first, and their scores with noise:
    int64 and float64. If fewer tokens can win, the first one with score -inf fills the rest.

    Raises MemoryError.
    """
    compute = _compute()
    assert compute is not None
    num_rows, vocab_size = logits.shape
    assert len(draws) == num_rows, "a draw for each row"
    tokens, scores = torch.empty(num_rows, count, dtype=torch.int32), torch.empty(num_rows, count, dtype=torch.float64)
    rows = logits.data_ptr(), logits.stride(0) * logits.element_size(), logits.dtype is torch.bfloat16
    sizes, results = (vocab_size, num_rows, count), (tokens.data_ptr(), scores.data_ptr())
    if num_rows and not compute(described(draws), *rows, *sizes, *results, torch.get_num_threads()):
        raise MemoryError("there is no memory for the logits of a row")
    return tokens.long(), scores


@functools.cache
def _compute() -> Callable[..., int] | None:
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    types = pointer, pointer, ctypes.c_int64, *[integer] * 4, pointer, pointer, integer
    return kernel("coupled_draw", *types, amx_is_faster=False)
