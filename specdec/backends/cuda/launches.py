"""The launches of the kernels: grids, sizes and strides. Loads triton at the first launch."""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from specdec.backends.cuda.memory import PassMemory
from specdec.backends.cuda.plan import ROWS, RUN

_MAX_HEADS = 8
"""Query heads of one key head that share a program."""

_MIN_LANES = 16
"""Rows of the smallest matrix product."""

TOKENS, STEP = 2048, 32
"""Tokens of a program of ``race``; keys of a step of ``attend``. With 64 keys registers spill (bench/LOG.md,
2026-11-29)."""

_NO_WINDOW = 1 << 30


@functools.cache
def _kernels() -> Any:
    from specdec.backends.cuda import kernels

    return kernels


def store_by_kernel(memory: PassMemory, pool: tuple[Tensor, Tensor], key: Tensor, value: Tensor) -> None:
    """Write key and value [rows, kv_heads, head_dim] into the slots of their rows."""
    if key.shape != value.shape:
        raise NotImplementedError("keys and values of different sizes, which backend torch knows")
    key, value = _rows(key), _rows(value)
    num_rows, kv_heads, head_dim = key.shape
    _kernels().store[(num_rows,)](
        *(key, value, *pool, memory["slots"]),
        *(*key.stride()[:2], *value.stride()[:2]),
        KV_HEADS=kv_heads,
        D=head_dim,
        WIDTH=_power(kv_heads * head_dim),
    )


def attend_by_kernels(
    memory: PassMemory,
    pool: tuple[Tensor, Tensor],
    query: Tensor,
    output: Tensor,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> None:
    """Write the attention of query [rows, heads, head_dim] to output, which has the same shape."""
    query = _rows(query)
    heads, (kv_heads, head_dim) = query.shape[1], pool[0].shape[2:]
    groups = heads // kv_heads
    per_program = max(_MIN_LANES // ROWS, min(_MAX_HEADS, _power(groups)))
    grid = memory.shape.items, kv_heads, -(-groups // per_program)
    width = max(16, _power(head_dim))
    sizes = {"KV_HEADS": kv_heads, "GROUPS": groups, "D": head_dim, "WIDTH": width, "ROWS": ROWS, "HEADS": per_program}
    num_parts = grid[0] * grid[1] * grid[2] * ROWS * per_program if memory.shape.in_runs else 1
    parts = [query.new_empty(num_parts * size, dtype=torch.float32) for size in (1, 1, width)]
    about = memory["chains"], memory["chain_rows"], memory["items"]
    kernels = _kernels()
    kernels.attend[grid](
        *(query, *pool, output, *about, memory["blocks"], *parts),
        *(*query.stride()[:2], *output.stride()[:2]),
        scale=scale,
        window=window or _NO_WINDOW,
        softcap=softcap or 0.0,
        BLOCK=memory.block_size,
        RUN=RUN,
        STEP=STEP,
        DOT=_dot(query.dtype),
        SOFTCAP=softcap is not None,
        num_warps=num_warps(ROWS * per_program),
        **sizes,
    )
    if memory.shape.in_runs:
        kernels.combine[grid](output, *about, *parts, *output.stride()[:2], **sizes)


def draw_by_kernels(logits: Tensor, draws: tuple[Tensor, Tensor, Tensor], count: int = 1) -> tuple[Tensor, Tensor]:
    """The ``count`` leading tokens of each row [rows, vocab], int32, and their scores, float64. ``draws``: seeds,
    positions and temperatures [rows]."""
    num_rows, vocab_size = logits.shape
    num_blocks = -(-vocab_size // TOKENS)
    part_scores, scores = (
        logits.new_empty(num_rows, size, dtype=torch.float64) for size in (num_blocks * count, count)
    )
    part_tokens, tokens = (torch.empty_like(part, dtype=torch.int32) for part in (part_scores, scores))
    kernels = _kernels()
    kernels.race[(num_rows, num_blocks)](
        *(logits, logits.stride(0), vocab_size, *draws, part_scores, part_tokens),
        BLOCK=TOKENS,
        COUNT=count,
    )
    kernels.leaders[(num_rows,)](
        *(part_scores, part_tokens, scores, tokens, num_blocks * count),
        PARTS=_power(num_blocks * count),
        COUNT=count,
    )
    return tokens, scores


def num_warps(lanes: int) -> int:
    """Of a program of ``attend``: so many that its numbers stay in registers."""
    return 8 if lanes >= 64 else 4


def _rows(tensor: Tensor) -> Tensor:
    """The tensor with contiguous rows of each head."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _dot(dtype: torch.dtype) -> Any:
    """The number type of products. Triton's interpreter multiplies the bit patterns of bfloat16."""
    import triton.language as tl

    if os.environ.get("TRITON_INTERPRET") == "1":
        return tl.float32
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[dtype]
