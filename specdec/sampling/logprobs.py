"""Logits -> logarithms of probabilities, of given tokens and of the most likely ones.

They are those of the model's own logits, before any transform, in float32. A row's numbers depend on this row alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specdec.core.device import indices
from specdec.core.limits import chunked
from specdec.core.rounds import Logprobs


def logprobs_of(
    logits: Sequence[Tensor], token_ids: Sequence[Sequence[int]], num_top: Sequence[int], logits_per_call: int
) -> list[Logprobs]:
    """Of each item, logits [n, vocab] and n token ids, with its ``num_top`` most likely tokens per row.

    ``logits_per_call``: numbers to compute at a time. All items leave the device as two arrays.
    """
    parts = [
        _computed([logits[i] for i in part], [token_ids[i] for i in part], max(num_top))
        for part in chunked([rows.numel() for rows in logits], logits_per_call)
    ]
    values = np.concatenate([part.cpu().numpy() for part, _ in parts])  # [rows, 1 + top] float32
    ids = np.concatenate([part.cpu().numpy() for _, part in parts])  # [rows, top] int64
    logprobs, start = [], 0
    for tokens, top in zip(token_ids, num_top, strict=True):
        rows = slice(start, start := start + len(tokens))
        logprobs.append(
            Logprobs(
                values[rows, 0].tolist(), ids[rows, :top].ravel().tolist(), values[rows, 1 : 1 + top].ravel().tolist()
            )
        )
    return logprobs


def _computed(logits: Sequence[Tensor], token_ids: Sequence[Sequence[int]], top: int) -> tuple[Tensor, Tensor]:
    """Log-softmax of the tokens and of the ``top`` most likely ones [rows, 1 + top], and their ids [rows, top]."""
    rows = torch.cat([part.float() for part in logits]).log_softmax(-1)
    top = min(top, rows.shape[-1])
    most_likely = torch.topk(_keys(rows), top).indices if top else rows.new_empty((len(rows), 0), dtype=torch.int64)
    chosen = indices([token for tokens in token_ids for token in tokens], rows.device)[:, None]
    return rows.gather(1, torch.cat([chosen, most_likely], 1)), most_likely


def _keys(rows: Tensor) -> Tensor:
    """Integers in the order of the numbers, [rows, vocab] int64; of equal numbers the lower id has the larger key."""
    bits = rows.view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) - torch.arange(rows.shape[-1], device=rows.device)
