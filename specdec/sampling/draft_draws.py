"""Whether a chain's tokens were drawn from the distributions that came with them, under token and block verification.

A draft draws each token by an exponential race (`specdec.sampling.distributions.race`) over noise that the target
knows as well, so the target can run the race again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
import torch

from specdec.core.limits import chunked
from specdec.core.noise import Domain, Key, exponentials_at
from specdec.core.tree import SparseDistribution, TokenTree

_NUMBERS_AT_ONCE = 1 << 13  # so that the intermediate arrays stay in the processor's cache

_MARGIN = 2.0**-40
"""Nats by which a winner may be behind. Scores are below 64 in magnitude, and machines compute their logarithms with
errors of a few times 2**-47. A token with a score this close to the best one's may have won on another machine."""

_Race = tuple[SparseDistribution, int, Key]
"""A distribution, the token that is claimed to have won, and the key of the noise."""


def drawn_as_said(chains: Sequence[TokenTree], keys: Sequence[Key]) -> list[bool]:
    """Per chain, whether every token is the one that its distribution and the noise give. ``keys``: of the first node
    of each chain. A node without a distribution was certain of its token, and nothing was drawn.

    Raises ValueError if a distribution lacks its token.
    """
    true = [True] * len(chains)
    races: list[_Race] = []
    chain_of: list[int] = []  # by race
    for index, (tree, key) in enumerate(zip(chains, keys, strict=True)):
        for node, distribution in enumerate(tree.draft_probs):
            if distribution is not None:
                races.append((distribution, tree.token_ids[node], key._replace(position=key.position + node)))
                chain_of.append(index)
    for part in chunked([len(distribution.token_ids) for distribution, *_ in races], _NUMBERS_AT_ONCE):
        for race, is_won in zip(part, _won(races[part.start : part.stop]), strict=True):
            true[chain_of[race]] &= is_won
    return true


def _won(races: Sequence[_Race]) -> list[bool]:
    """Whether each race was won as it is claimed. On the CPU, where the numbers come from and go to."""
    distributions, tokens, keys = zip(*races, strict=True)
    sizes = [len(distribution.token_ids) for distribution in distributions]
    winners = [one.token_ids.index(token) for one, token in zip(distributions, tokens, strict=True)]
    ids = np.fromiter(chain.from_iterable(one.token_ids for one in distributions), np.int64)  # [n]
    weights = np.fromiter(chain.from_iterable(one.weights for one in distributions), np.float64)  # [n]
    rows = np.repeat(np.arange(len(races)), sizes)  # [n]
    noise = exponentials_at(keys, torch.from_numpy(rows), torch.from_numpy(ids), Domain.DRAFT).numpy()  # [n]
    scores = np.log(noise) - np.log(weights)  # [n], the lowest of a row wins
    starts = np.cumsum([0, *sizes[:-1]])  # [races]
    won: list[bool] = (scores[starts + winners] <= np.minimum.reduceat(scores, starts) + _MARGIN).tolist()
    return won
