"""An n-gram model of token ids: which tokens followed the same last one to four tokens in some texts.

Probabilities are by stupid backoff: those of the longest context that occurs, times 0.4 for each shorter one (Brants et
al. 2007, "Large Language Models in Machine Translation").
"""

from __future__ import annotations

import hashlib
import re
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from specdec.runner.failures import in_words
from specdec.runner.files import refuse_inflated

MAX_CONTEXT = 4
"""Limit of the tokens of a context."""

KEPT = 8
"""Successors kept of a context, the most frequent ones."""

BACKOFF = 0.4
TEXT_WEIGHT = 8
"""Weight of an occurrence in the text that is being continued."""

_FACTOR = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_FORMAT = 1
_LISTS = {"keys": "u", "starts": "i", "tokens": "u", "counts": "u", "totals": "u"}
"""The arrays of each size of contexts, with numpy's kinds of their numbers."""


class NgramModel:
    """``vocab_size`` and ``fingerprint`` are of the tokenizer (specdec.runner.vocabulary)."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        """``arrays``: see ``build``."""
        self.vocab_size = int(arrays["vocab_size"])
        self.fingerprint = str(arrays["fingerprint"])
        self._arrays = arrays

    @staticmethod
    def load(file: Path) -> NgramModel:
        """Raises ValueError with a message for the operator."""
        try:
            with open(file, "rb") as stream:
                if not zipfile.is_zipfile(stream):
                    raise ValueError("it is no archive, or not a whole one")
            refuse_inflated(file)
            with np.load(file, allow_pickle=False) as archive:
                arrays = dict(archive)
            _check(arrays)
        except Exception as error:  # zipfile, zlib and numpy have their own, and a broken file may cause any of them
            why = in_words(error)
            raise ValueError(f"{file} is no n-gram model as `specdec ngram build` writes it: {why}") from error
        return NgramModel(arrays)

    def save(self, file: Path) -> None:
        with open(file, "wb") as stream:
            np.savez_compressed(stream, **self._arrays)  # type: ignore[arg-type]

    @property
    def digest(self) -> str:
        """Of all numbers: models with equal digests propose the same."""
        digest = hashlib.sha256()
        for name in sorted(self._arrays):
            digest.update(name.encode() + self._arrays[name].tobytes())
        return digest.hexdigest()

    def successors(self, context: Sequence[int]) -> tuple[list[int], list[int], int]:
        """The tokens that followed this context of 1 to MAX_CONTEXT ids, their counts, and the count of all."""
        size = len(context)
        keys = self._arrays[f"keys{size}"]
        key = np.uint64(_key(context))
        index = int(np.searchsorted(keys, key))
        if index == len(keys) or keys[index] != key:
            return [], [], 0
        start, end = self._arrays[f"starts{size}"][index : index + 2]
        tokens, counts = (self._arrays[f"{name}{size}"][start:end].tolist() for name in ("tokens", "counts"))
        return tokens, counts, int(self._arrays[f"totals{size}"][index])


class TextCounts:
    """What followed the same contexts in one text so far."""

    def __init__(self) -> None:
        self._tail: tuple[int, ...] = ()
        self._counts: dict[tuple[int, ...], dict[int, int]] = {}

    def take_in(self, ids: Iterable[int]) -> None:
        for token in ids:
            for size in range(2, len(self._tail) + 1):  # a single token says too little
                counts = self._counts.setdefault(self._tail[-size:], {})
                counts[token] = counts.get(token, 0) + 1
            self._tail = (*self._tail, token)[-MAX_CONTEXT:]

    def successors(self, context: Sequence[int]) -> dict[int, int]:
        return self._counts.get(tuple(context), {})


def scores_after(tail: Sequence[int], model: NgramModel, text: TextCounts, *, count: int) -> dict[int, float]:
    """The most likely ``count`` or more tokens after a ``text`` that ends with ``tail``, with scores by backoff."""
    scores: dict[int, float] = {}
    factor = 1.0
    for size in range(min(MAX_CONTEXT, len(tail)), 0, -1):
        context = tail[-size:]
        tokens, counts, total = model.successors(context)
        text_counts = text.successors(context)
        total += TEXT_WEIGHT * sum(text_counts.values())
        if total:
            merged = dict(zip(tokens, counts, strict=True))
            for token, number in text_counts.items():
                merged[token] = merged.get(token, 0) + TEXT_WEIGHT * number
            for token, number in merged.items():
                scores.setdefault(token, factor * number / total)
            factor *= BACKOFF
            if len(scores) >= count:
                break
    return scores


def build(texts: Iterable[Sequence[int]], vocab_size: int, fingerprint: str) -> NgramModel:
    """Count all contexts in ``texts``. Those that occurred once are kept up to two tokens only."""
    arrays = {
        "format": np.array(_FORMAT),
        "vocab_size": np.array(vocab_size),
        "fingerprint": np.array(fingerprint),
    }
    long_enough = [np.asarray(text, np.uint64) for text in texts if len(text) > 1]
    for size in range(1, MAX_CONTEXT + 1):
        parts = [_followed(text, size) for text in long_enough if len(text) > size]
        keys, tokens = (
            np.concatenate([part[index] for part in parts]) if parts else np.empty(0, np.uint64) for index in range(2)
        )
        arrays |= _count(keys, tokens, size=size, min_total=2 if size > 2 else 1)
    return NgramModel(arrays)


def _check(arrays: dict[str, np.ndarray]) -> None:
    """Raises ValueError for arrays that ``build`` does not make: a pass would fail with them, or never end."""
    sizes = range(1, MAX_CONTEXT + 1)
    kinds = {"format": "iu", "vocab_size": "iu", "fingerprint": "U"}
    kinds |= {f"{name}{size}": kind for name, kind in _LISTS.items() for size in sizes}
    if different := sorted(arrays.keys() ^ kinds.keys()):
        raise ValueError(f"it has {'an unknown' if different[0] in arrays else 'no'} array {different[0]}")
    for name, array in arrays.items():
        if array.ndim != (name[:-1] in _LISTS) or array.dtype.kind not in kinds[name]:
            raise ValueError(f"its array {name} is of another kind")
    if int(arrays["format"]) != _FORMAT:
        raise ValueError(f"its format is {int(arrays['format'])}, not {_FORMAT}")
    vocab_size = int(arrays["vocab_size"])
    if not 0 < vocab_size < 1 << 31 or not re.fullmatch("[0-9a-f]*", str(arrays["fingerprint"])):
        raise ValueError("its vocabulary is none")
    for size in sizes:
        keys, starts, tokens, counts, totals = (arrays[f"{name}{size}"] for name in _LISTS)
        fits = len(keys) == len(totals) == len(starts) - 1 and len(tokens) == len(counts)
        if not (fits and starts[0] == 0 and starts[-1] == len(tokens) and (np.diff(starts) >= 0).all()):
            raise ValueError(f"its arrays for contexts of {size} tokens do not fit together")
        if not (keys[1:] > keys[:-1]).all():
            raise ValueError(f"its contexts of {size} tokens are not in order")
        if len(tokens) and tokens.max() >= vocab_size:
            raise ValueError(f"it has the token {tokens.max()}, outside of its vocabulary of {vocab_size}")


def _followed(text: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """The key of each context of a text, and the token after it."""
    keys = np.zeros(len(text) - size, np.uint64)
    with np.errstate(over="ignore"):
        for offset in range(size):
            keys = keys * np.uint64(_FACTOR) + text[offset : offset + len(keys)] + np.uint64(1)
    return keys, text[size:]


def _key(context: Sequence[int]) -> int:
    key = 0
    for token in context:
        key = (key * _FACTOR + token + 1) & _MASK
    return key


def _count(keys: np.ndarray, tokens: np.ndarray, *, size: int, min_total: int) -> dict[str, np.ndarray]:
    """The arrays of one size of contexts: sorted keys, and the successors of each, the most frequent first."""
    order = np.lexsort((tokens, keys))
    keys, tokens = keys[order], tokens[order]
    new = np.ones(len(keys), bool)
    new[1:] = (keys[1:] != keys[:-1]) | (tokens[1:] != tokens[:-1])
    firsts = np.flatnonzero(new)
    counts = np.diff(np.append(firsts, len(keys)))
    keys, tokens = keys[firsts], tokens[firsts]
    order = np.lexsort((tokens, -counts, keys))
    keys, tokens, counts = keys[order], tokens[order], counts[order]
    contexts, starts, lengths = np.unique(keys, return_index=True, return_counts=True)
    totals = np.add.reduceat(counts, starts) if len(starts) else counts
    enough = totals >= min_total
    rank = np.arange(len(keys)) - np.repeat(starts, lengths)
    kept = (rank < KEPT) & np.repeat(enough, lengths)
    contexts, totals = contexts[enough], totals[enough]
    ends = np.cumsum(np.minimum(lengths, KEPT)[enough])
    return {
        f"keys{size}": contexts,
        f"starts{size}": np.append(0, ends).astype(np.int64),
        f"tokens{size}": tokens[kept].astype(np.uint32),
        f"counts{size}": counts[kept].astype(np.uint32),
        f"totals{size}": totals.astype(np.uint32),
    }
