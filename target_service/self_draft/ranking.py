"""The order of a head's candidates: by log q plus the noise of the target's own draw, so that coupled draws are met."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.core.device import indices, numbers
from specdec.core.noise import Domain, Key, exponentials_at
from specdec.core.sequence import Draw
from specdec.sampling.confidence import confidence_of
from target_service.self_draft.trees import NO_CANDIDATES, NUM_CHILDREN, Candidates

_NUM_POSSIBLE = 256
"""Tokens of a row that get noise. One behind them hardly ever wins."""


def ranked_candidates(
    logits: Tensor, ids: Tensor, draws: Sequence[Draw], num_children: int = NUM_CHILDREN
) -> list[Candidates]:
    """Those of each row of logits [rows, draft vocabulary], of which ``ids``, [draft vocabulary] or one for each logit,
    are the target's. ``draws``: the target's own. None in a row with NaN or infinity."""
    tokens, scores = ranked(logits, ids, draws, count=num_children)
    # Copied from the device once each, for all rows.
    rows = zip(tokens.tolist(), scores[:, 0].isfinite().tolist(), confidence_of(scores).tolist(), strict=True)
    return [Candidates(children, confidence) if sound else NO_CANDIDATES for children, sound, confidence in rows]


def ranked(logits: Tensor, ids: Tensor, draws: Sequence[Draw], count: int) -> tuple[Tensor, Tensor]:
    """The most likely tokens after each row, and their scores: [rows, count]. A row with NaN has a score of NaN."""
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
