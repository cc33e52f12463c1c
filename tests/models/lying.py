"""Drafters that want a text of their own and lie about what they drew, and what an honest one draws.

They know the seed, and so all noise, as every draft does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import torch

from draft_service.drafter import DraftSequence
from specdec.core.noise import Domain, Key, exponentials
from specdec.core.rounds import ModelInfo
from specdec.core.tree import Candidate, SparseDistribution
from tests.models.scripted import Scripted

Scheme = Callable[[Sequence[float], int], SparseDistribution]
"""From the noise of every token and the token that is wanted: the distribution that it is said to be drawn from."""


def noise_of(key: Key, vocab_size: int) -> list[float]:
    """The noise of every token in the draft's race."""
    return exponentials([key], Domain.DRAFT, vocab_size)[0].tolist()


def winner(distribution: SparseDistribution, noise: Sequence[float]) -> int:
    """The token that an honest draft draws."""
    return min(
        zip(distribution.token_ids, distribution.weights, strict=True), key=lambda pair: noise[pair[0]] / pair[1]
    )[0]


def barefaced(noise: Sequence[float], token: int) -> SparseDistribution:
    """The token was so unlikely that its probability under the target is always enough."""
    return SparseDistribution((token, (token + 1) % len(noise)), (2.0**-24, 1.0))


def scheming(noise: Sequence[float], token: int) -> SparseDistribution:
    """The token does win its race, with the smallest probability of any distribution."""
    others = sorted((each for each in range(len(noise)) if each != token), key=noise.__getitem__, reverse=True)
    best, best_share = SparseDistribution((token,), (1.0,)), 1.0
    for number, other in enumerate(others[:1023], 1):
        weight = float(torch.tensor(1.001 * noise[token] / noise[other] + 2.0**-24).half())
        if weight <= 1.0 and (share := weight / (weight + number)) < best_share:
            best_share = share
            best = SparseDistribution((token, *others[:number]), (weight, *[1.0] * number))
    return best


class LyingDrafter(Scripted):
    """Proposes ``text`` as the output."""

    def __init__(self, target: ModelInfo, text: Sequence[int], scheme: Scheme) -> None:
        super().__init__(target)
        self._text = text
        self._scheme = scheme

    def next_nodes(self, sequence: DraftSequence, rng: random.Random) -> Sequence[Candidate]:
        spec, base = sequence.spec, len(sequence.ids)
        position = base + len(sequence.tree)
        token = self._text[(position - spec.num_prompt_tokens) % len(self._text)]
        if spec.keyed_by_token:
            return [Candidate(len(sequence.tree) - 1, token)]
        noise = noise_of(Key(spec.seed, position, base), self.info.vocab_size)
        return [Candidate(len(sequence.tree) - 1, token, self._scheme(noise, token))]
