"""Loads that are much alike: what was learnt under one of them holds under the others."""

from __future__ import annotations

import functools
import math


@functools.cache
def load_size(everybody: int) -> int:
    """The same within a factor of two or so of sequences that share a target."""
    return round(math.log2(everybody))
