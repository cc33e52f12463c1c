"""The confidence bucket of a drafter's best guess, which tells how likely it is to be right."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec.core.tree import MAX_CONFIDENCE

_MIN_MARGIN = 2.0**-8
"""Nats. Smaller margins between the best two guesses are in the lowest confidence bucket, too."""


def confidence_of(scores: Tensor) -> Tensor:  # [rows] int64
    """The confidence bucket of each row, from 1 to MAX_CONFIDENCE: the margin of the best score over the second, in
    octaves. ``scores`` [rows, n] are sorted, the best first."""
    if scores.shape[-1] < 2:
        return scores.new_full(scores.shape[:1], MAX_CONFIDENCE, dtype=torch.int64)
    margins = (scores[:, 0] - scores[:, 1]).nan_to_num(nan=0.0)
    return (margins.clamp(_MIN_MARGIN).log2() - math.log2(_MIN_MARGIN)).long().clamp(max=MAX_CONFIDENCE - 1) + 1
