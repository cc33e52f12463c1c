"""Whether a chain's tokens were drawn from the distributions that came with them, under token and block verification.

A draft draws each token by an exponential race (`specdec.sampling.distributions.race`) over noise that the target
knows as well, so the target can run the race again. Knows what was sent, and its keys; does not know models.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from specdec.core.limits import chunked
from specdec.core.noise import Domain, Key, exponentials_at
from specdec.core.tree import SparseDistribution, TokenTree

_NUMBERS_AT_ONCE = 1 << 16

_MARGIN = 2.0**-40
"""Nats by which a winner may be behind. Scores are below 64 in magnitude, and machines compute their logarithms with
errors of a few times 2**-47. A token with a score this close to the best one's may have won on another machine."""

_Race = tuple[SparseDistribution, int, Key]
"""A distribution, the token that is said to have won, and the key of the noise."""


def drawn_as_said(chains: Sequence[TokenTree], keys: Sequence[Key]) -> list[bool]:
    """Per chain, whether every token is the one that its distribution and the noise give. ``keys``: of the first node
    of each chain. A node without a distribution was certain of its token, and nothing was drawn.

    Raises ValueError if a distribution lacks its token.
    """
    found = [True] * len(chains)
    races: list[_Race] = []
    chain_of: list[int] = []
    for index, (chain, key) in enumerate(zip(chains, keys, strict=True)):
        for node, distribution in enumerate(chain.draft_probs):
            if distribution is not None:
                races.append((distribution, chain.token_ids[node], key._replace(position=key.position + node)))
                chain_of.append(index)
    for part in chunked([len(distribution.token_ids) for distribution, *_ in races], _NUMBERS_AT_ONCE):
        for race, is_won in zip(part, _won(races[part.start : part.stop]), strict=True):
            found[chain_of[race]] &= is_won
    return found


def _won(races: Sequence[_Race]) -> list[bool]:
    """Whether each race was won as it is said. On the CPU, where the numbers come from and go to."""
    distributions, tokens, keys = zip(*races, strict=True)
    sizes = torch.tensor([len(each.token_ids) for each in distributions])  # [races]
    ids = torch.tensor([token for each in distributions for token in each.token_ids])  # [n]
    weights = torch.tensor([w for each in distributions for w in each.weights], dtype=torch.float64)  # [n]
    rows = torch.arange(len(races)).repeat_interleave(sizes)  # [n]
    scores = exponentials_at(keys, rows, ids, Domain.DRAFT).log_().sub_(weights.log_())  # [n], the lowest of a row wins
    best = scores.new_full(sizes.shape, math.inf).scatter_reduce(0, rows, scores, "amin")  # [races]
    places = [each.token_ids.index(token) for each, token in zip(distributions, tokens, strict=True)]
    own = scores[sizes.cumsum(0) - sizes + torch.tensor(places)]  # [races]
    won: list[bool] = (own <= best + _MARGIN).tolist()
    return won
