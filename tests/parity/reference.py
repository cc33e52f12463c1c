"""The random numbers and the sampling of the documentation, written a second time, in numpy alone.

Nothing here may import specdec: what the services compute is compared with this.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)

COUPLED, DRAFT, ACCEPT, CORRECTION, SEED = range(5)


def philox(counter: list[np.ndarray | int], seed: np.ndarray | int) -> tuple[np.ndarray, ...]:
    """Philox4x32-10 (Salmon et al., SC 2011): four uint32 words (in uint64) per counter; arguments broadcast."""
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    key = np.asarray(seed, dtype=np.uint64)
    k0, k1 = key & _LOW, key >> _SHIFT
    for _ in range(10):
        # The product of two 32-bit words fits 64 bits exactly.
        p0, p1 = np.uint64(0xD2511F53) * c0, np.uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (p1 >> _SHIFT) ^ c1 ^ k0, p1 & _LOW, (p0 >> _SHIFT) ^ c3 ^ k1, p0 & _LOW
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & _LOW, (k1 + np.uint64(0xBB67AE85)) & _LOW
    return c0, c1, c2, c3


def uniform(words: np.ndarray) -> np.ndarray:
    return (words.astype(np.float64) + 0.5) / 2.0**32


def coupled_exponentials(seed: int, position: int, vocab_size: int) -> np.ndarray:  # [vocab]
    """The standard exponentials of the race at one position."""
    quads = np.arange(-(-vocab_size // 4))
    words = np.stack(np.broadcast_arrays(*philox([position, 0, quads, COUPLED], seed)), axis=-1)
    return -np.log1p(-uniform(words.reshape(-1)[:vocab_size]))


def sample_seed(seed: int, index: int) -> int:
    """The seed of sample ``index``: the request's own for sample 0, then PRF(seed, index)."""
    if index == 0:
        return seed
    low, high, _, _ = philox([index, 0, 0, SEED], seed)
    return int(low) | int(high) << 32


def transformed(
    logits: np.ndarray,  # [vocab]
    prompt: Sequence[int],
    output: Sequence[int],
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    logit_bias: Mapping[int, float] = MappingProxyType({}),
    min_tokens: int = 0,
    end_token_ids: Sequence[int] = (),
) -> np.ndarray:  # [vocab]
    """The logits after this text: bias, repetition over all of it, frequency and presence over the output."""
    scores = logits.astype(np.float64)
    for token, bias in logit_bias.items():
        scores[token] += bias
    seen = np.zeros(len(scores), dtype=bool)
    seen[[*prompt, *output]] = True
    repeated = np.where(scores > 0, scores / repetition_penalty, scores * repetition_penalty)
    counts = np.bincount(np.array(output, dtype=np.int64), minlength=len(scores))
    scores = np.where(seen, repeated, scores) - frequency_penalty * counts - presence_penalty * (counts > 0)
    if len(output) < min_tokens:
        scores[list(end_token_ids)] = -np.inf
    return scores


class Filtered:
    """Logits [vocab] after the temperature, and which tokens survive top-k, then top-p, then min-p."""

    def __init__(
        self, logits: np.ndarray, temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
    ) -> None:
        self.scaled = logits.astype(np.float64) / temperature
        self._filters = (top_k, top_p, min_p)

    @property
    def distribution(self) -> np.ndarray:  # [vocab]
        weights = np.where(self.survivors(), np.exp(self.scaled - self.scaled.max()), 0.0)
        return weights / weights.sum()

    def survivors(self, slack: float = 0.0) -> np.ndarray:  # [vocab] bool
        """With slack > 0 those too that miss a filter by no more than that, with < 0 only those that pass by more."""
        top_k, top_p, min_p = self._filters
        scaled = self.scaled
        kept = np.ones(len(scaled), dtype=bool)
        order = np.argsort(-scaled, kind="stable")  # equals: lowest id first
        if 0 < top_k < len(scaled):
            if slack == 0.0:
                kept[order[top_k:]] = False
            elif slack > 0.0:
                kept &= scaled >= scaled[order[top_k - 1]] - slack
            else:
                kept &= scaled > scaled[order[top_k]] - slack
        if top_p < 1.0:
            weights = np.where(kept, np.exp(scaled - scaled[order[0]]), 0.0)[order]
            before = np.cumsum(weights / weights.sum()) - weights / weights.sum()
            kept[order[before >= top_p + slack]] = False
        if min_p > 0.0:
            kept &= scaled >= scaled[order[0]] + np.log(min_p) - slack
        kept[order[0]] = True
        return kept


class Race:
    """One draw of coupled sampling from logits [vocab]: filters, then the exponential race."""

    def __init__(self, logits: np.ndarray, exponentials: np.ndarray, **params: float) -> None:
        self._filtered = Filtered(logits, **params)
        self._race = self._filtered.scaled - np.log(exponentials)

    @property
    def winner(self) -> int:
        return int(np.where(self._filtered.survivors(), self._race, -np.inf).argmax())

    def nearly(self, token_id: int, slack: float = 1e-4) -> bool:
        """Whether ``token_id`` wins, or would if scores, or a filter's edge, moved by ``slack``."""
        sure, possible = self._filtered.survivors(-slack), self._filtered.survivors(slack)
        best = self._race[sure].max()
        return bool(possible[token_id] and self._race[token_id] > best - slack)
