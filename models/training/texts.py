"""Texts as token ids: what is learned from, its file, and its batches.

The best texts are those that a target wrote itself, because acceptance is about the target's tokens.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HELD_OUT_SHARE = 1 / 32
_JOINED, _JOINED_EVERY = 4, 8
"""So many texts in a row make one with a long context, in one of so many batches."""


@dataclass(frozen=True, slots=True)
class Text:
    """Token ids of a prompt and its answer, which begins at ``first``. The answer is what is learned."""

    ids: list[int]
    first: int

    @property
    def answer(self) -> list[int]:
        return self.ids[self.first :]


@dataclass(frozen=True, slots=True)
class Batch:
    """``ids`` [texts, length]; ``is_answer`` is true where the token belongs to an answer."""

    ids: Tensor
    is_answer: Tensor

    @property
    def is_followed(self) -> Tensor:
        """True where the next token belongs to an answer, [texts, length]."""
        is_followed = torch.zeros_like(self.is_answer)
        is_followed[:, :-1] = self.is_answer[:, 1:]
        return is_followed


def padded(texts: Sequence[Text], device: str) -> Batch:
    """The texts as one batch, at the left."""
    ids = torch.zeros(len(texts), max(len(text.ids) for text in texts), dtype=torch.int64)
    is_answer = torch.zeros_like(ids, dtype=torch.bool)
    for row, text in enumerate(texts):
        ids[row, : len(text.ids)] = torch.tensor(text.ids)
        is_answer[row, text.first : len(text.ids)] = True
    return Batch(ids.to(device), is_answer.to(device))


def batches(texts: Sequence[Text], num_tokens: int, device: str, seed: int) -> Iterator[Batch]:
    """Endless batches of at most ``num_tokens`` with padding, of texts of similar length. Each epoch has another
    order."""
    order = random.Random(seed)
    while True:
        groups: list[list[Text]] = [[]]
        for text in sorted(texts, key=lambda text: (len(text.ids), order.random())):
            if groups[-1] and (len(groups[-1]) + 1) * len(text.ids) > num_tokens:
                groups.append([])
            groups[-1].append(text)
        order.shuffle(groups)
        for number, group in enumerate(groups):
            yield padded(list(_joined(group)) if number % _JOINED_EVERY == 0 else group, device)


def _joined(texts: Sequence[Text]) -> Iterator[Text]:
    """Texts in a row as one. The last answer counts."""
    for start in range(0, len(texts), _JOINED):
        *before, last = texts[start : start + _JOINED]
        context = [token for text in before for token in text.ids]
        yield Text([*context, *last.ids], len(context) + last.first)


def split(texts: Sequence[Text]) -> tuple[list[Text], list[Text]]:
    """The first texts, which are held out, and all others that have another prompt."""
    held_out = list(texts[: max(int(len(texts) * HELD_OUT_SHARE), 1)])
    prompts = {tuple(text.ids[: text.first]) for text in held_out}
    return held_out, [text for text in texts if tuple(text.ids[: text.first]) not in prompts]


def save(texts: Sequence[Text], directory: Path, number: int) -> None:
    """As one compressed file of this number, which appears at once and complete."""
    ids = np.concatenate([text.ids for text in texts])
    partial = directory / f"partial-{number:04d}.npz"
    np.savez_compressed(
        partial,
        ids=ids.astype(np.uint16 if ids.max() < 1 << 16 else np.uint32),
        lengths=np.array([len(text.ids) for text in texts], np.uint32),
        firsts=np.array([text.first for text in texts], np.uint32),
    )
    partial.replace(directory / f"answers-{number:04d}.npz")


def files(directory: Path) -> list[Path]:
    return sorted(directory.glob("answers-*.npz"))


def load(directory: Path) -> list[Text]:
    """All texts that were saved in a directory."""
    texts: list[Text] = []
    for file in files(directory):
        with np.load(file) as arrays:
            parts = np.split(arrays["ids"].astype(np.int64), arrays["lengths"].cumsum()[:-1])
            texts += [Text(ids.tolist(), int(first)) for ids, first in zip(parts, arrays["firsts"], strict=True)]
    return texts
