"""Greedy and coupled draws by torch, in chunks of rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.core.limits import chunked
from specdec.core.noise import Key
from specdec.core.sequence import Draw, SamplingParams
from specdec.sampling.distributions import Noise, most_likely_draws, sample_coupled
from specdec.sampling.noise_cache import KeptRows, PassNoise


class TorchDraw:
    """The draws of one model, with a cache of noise rows that all its sequences share."""

    def __init__(self, logits_per_call: int) -> None:
        self._logits_per_call = logits_per_call
        self._kept = KeptRows()

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:  # [rows, vocab] -> [rows] int64
        """See specdec.backends.base.Backend."""
        [tokens] = self._by_chunks(lambda chunk, params, noise: (sample_coupled(chunk, params, noise),), logits, draws)
        return tokens

    def leaders(self, logits: Tensor, draws: Sequence[Draw], count: int) -> tuple[Tensor, Tensor]:
        """See specdec.backends.base.Backend."""
        tokens, scores = self._by_chunks(
            lambda chunk, params, noise: most_likely_draws(chunk, params, noise, count=count), logits, draws
        )
        return tokens, scores

    def _by_chunks(
        self,
        draw: Callable[[Tensor, Sequence[SamplingParams], Noise], tuple[Tensor, ...]],
        logits: Tensor,
        draws: Sequence[Draw],
    ) -> Sequence[Tensor]:  # [rows, ...] each
        drawn = []
        for part in chunked([logits.shape[-1]] * len(logits), self._logits_per_call):
            params, seeds, positions = zip(*(draws[row] for row in part), strict=True)
            noise = PassNoise(list(map(Key, seeds, positions)), logits.shape[-1], logits.device, kept=self._kept)
            drawn.append(draw(logits[part.start : part.stop], params, noise))
        return drawn[0] if len(drawn) == 1 else [torch.cat(parts) for parts in zip(*drawn, strict=True)]
