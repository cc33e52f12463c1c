"""What speculation promises: expected tokens over the time they take, beside the target alone. Pure arithmetic."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Iterator, Sequence

ON, OFF = 1.05, 1.02
"""How much faster than the target alone speculation must promise to be: to begin, and to go on."""

ON_AMONG, OFF_AMONG = 1.1, 1.05
"""The same among several requests: drafts have a prompt of each to take in, and texts that go on at other speeds end at
other times, so that fewer share a pass."""


def promises(chances: Iterable[float], rounds: Sequence[float], alone_s: float) -> list[float]:
    """How many times the target alone's tokens per second, by K; ``chances`` are those of the first 1, 2, ... draft
    tokens being accepted, ``rounds`` seconds by K."""
    found, expected = [1.0], 1.0
    for chance, seconds in zip(chances, rounds[1:], strict=False):
        expected += chance
        found.append(expected * alone_s / seconds)
    return found


def chain(of_ranks: Sequence[float], num_siblings: int = 0) -> Iterator[float]:
    """Chances for ``promises`` of a chain of first guesses; ``num_siblings`` of each token are verified, too, which may
    be right but lead no further."""
    here = sum(of_ranks[: 1 + num_siblings])
    return itertools.accumulate(itertools.repeat(of_ranks[0]), operator.mul, initial=here)
