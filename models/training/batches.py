"""Batches of windows cut from one token stream."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from models.training.corpus import TokenStream

LENGTHS = {512: 0.85, 2048: 0.15}
"""Window lengths and the share of the batches that use each of them. Long windows train long contexts."""


def _starts(size: int, length: int, rng: np.random.Generator) -> Iterator[int]:
    """Endless starts of windows. Every epoch tiles the stream from a new random offset, in a new random order."""
    while True:
        first = int(rng.integers(length))
        for start in rng.permutation(np.arange(first, size - length, length)):
            yield int(start)


def windows(stream: TokenStream, starts: list[int], length: int) -> Tensor:
    """Windows of length + 1 tokens, [starts, length + 1]: inputs and next-token targets in one tensor."""
    rows = [stream[start : start + length + 1].astype(np.int64) for start in starts]
    return torch.from_numpy(np.stack(rows))


def training_batches(stream: TokenStream, tokens: int, seed: int) -> Iterator[Tensor]:
    """Endless training batches of a constant number of tokens."""
    rng = np.random.default_rng(seed)
    sources = {length: _starts(len(stream), length, rng) for length in LENGTHS}
    lengths, shares = list(LENGTHS), list(LENGTHS.values())
    while True:
        length = int(rng.choice(lengths, p=shares))
        starts = [next(sources[length]) for _ in range(tokens // length)]
        yield windows(stream, starts, length)


def evaluation_batches(stream: TokenStream, rows: int, length: int = 512) -> Iterator[Tensor]:
    """The consecutive windows of the stream, each once."""
    starts = list(range(0, len(stream) - length, length))
    for first in range(0, len(starts), rows):
        yield windows(stream, starts[first : first + rows], length)
