"""Logits -> logarithms of probabilities, of given tokens and of the likeliest ones. Does not know sampling.

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
    logits: Sequence[Tensor], token_ids: Sequence[Sequence[int]], num_top: Sequence[int], most_logits: int
) -> list[Logprobs]:
    """Of each item, logits [n, vocab] and n token ids, with its ``num_top`` likeliest tokens per row.

    ``most_logits``: numbers to compute at a time. All items leave the device as two arrays.
    """
    parts = [
        _computed([logits[i] for i in some], [token_ids[i] for i in some], max(num_top))
        for some in chunked([rows.numel() for rows in logits], most_logits)
    ]
    values = np.concatenate([part.cpu().numpy() for part, _ in parts])  # [rows, 1 + top] float32
    ids = np.concatenate([part.cpu().numpy() for _, part in parts])  # [rows, top] int64
    found, start = [], 0
    for tokens, top in zip(token_ids, num_top, strict=True):
        rows = slice(start, start := start + len(tokens))
        found.append(
            Logprobs(
                values[rows, 0].tolist(), ids[rows, :top].ravel().tolist(), values[rows, 1 : 1 + top].ravel().tolist()
            )
        )
    return found


def _computed(logits: Sequence[Tensor], token_ids: Sequence[Sequence[int]], top: int) -> tuple[Tensor, Tensor]:
    """Log-softmax of the tokens and of the ``top`` likeliest ones [rows, 1 + top], and the latter's ids [rows, top]."""
    rows = torch.cat([each.float() for each in logits]).log_softmax(-1)
    top = min(top, rows.shape[-1])
    likeliest = torch.topk(_keys(rows), top).indices if top else rows.new_empty((len(rows), 0), dtype=torch.int64)
    chosen = indices([token for tokens in token_ids for token in tokens], rows.device)[:, None]
    return rows.gather(1, torch.cat([chosen, likeliest], 1)), likeliest


def _keys(rows: Tensor) -> Tensor:
    """Integers in the order of the numbers, [rows, vocab] int64; of equal numbers the lower id has the larger key."""
    bits = rows.view(torch.int32).long()
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return (ordered << 32) - torch.arange(rows.shape[-1], device=rows.device)
