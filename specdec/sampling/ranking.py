"""The tokens that a target most likely draws among those that a head knows: by log q plus the noise of the draws."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.device import indices, numbers
from specdec.core.noise import Domain, Key, exponentials_at
from specdec.core.sequence import Draw

_NUM_POSSIBLE = 256
"""Tokens of a row that get noise. One behind them hardly ever wins."""


def ranked(logits: Tensor, draws: Sequence[Draw], count: int, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The most likely tokens after each row of logits [rows, n], and their scores: [rows, count] each. ``ids``, [n] or
    one for each logit, are their tokens. A row with NaN has a score of NaN."""
    best = logits.double().topk(min(_NUM_POSSIBLE, logits.shape[-1]), -1)
    scores = best.values
    tokens = ids[best.indices] if ids.dim() == 1 else ids.gather(-1, best.indices)
    drawn = [row for row, draw in enumerate(draws) if not draw.sampling.greedy]
    if drawn:
        rows = indices(drawn, logits.device)
        temperatures = numbers([draws[row].sampling.temperature for row in drawn], logits.device)[:, None]
        keys = [Key(draws[row].seed, draws[row].position) for row in drawn]
        key_rows = torch.arange(len(drawn), device=logits.device)[:, None].expand(-1, tokens.shape[1])
        noise = exponentials_at(keys, key_rows.flatten(), token_ids=tokens[rows].flatten(), domain=Domain.COUPLED)
        scores[rows] = scores[rows] / temperatures - noise.view_as(key_rows).log()
    first = scores.topk(min(count, scores.shape[-1]), -1)
    return tokens.gather(-1, first.indices), first.values
