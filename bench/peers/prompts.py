"""Prompts as token ids, new ones at every call, so that no contender has a prompt in its cache.

Knows the source of the ids; does not know their use.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer


class PromptSource:
    """Windows of a text of ids, or random ids where there is no text."""

    def __init__(self, vocab_size: int, text: Sequence[int] = (), seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._text = text
        self._random = random.Random(seed)

    @staticmethod
    def of_bundled(models: Path, vocab_size: int, seed: int = 0, model: Path | None = None) -> PromptSource:
        """A source of windows of the bundled pair's held-out prompts, joined to one text, by the tokenizer of ``model``
        (of the bundled target without one)."""
        tokenizer = Tokenizer.from_file(str((model or models / "target") / "tokenizer.json"))
        texts = [prompt["text"] for prompt in json.loads((models / "prompts.json").read_text())]
        return PromptSource(vocab_size, tokenizer.encode("\n\n".join(texts)).ids, seed)

    def take(self, count: int, length: int) -> list[list[int]]:
        """``count`` prompts of ``length`` ids. Raises ValueError if the text is shorter than that."""
        return [self._one(length) for _ in range(count)]

    def _one(self, length: int) -> list[int]:
        if not self._text:
            return [self._random.randrange(self._vocab_size) for _ in range(length)]
        if length > len(self._text):
            raise ValueError(f"the text has {len(self._text)} ids, {length} were asked for")
        start = self._random.randrange(len(self._text) - length + 1)
        return list(self._text[start : start + length])
