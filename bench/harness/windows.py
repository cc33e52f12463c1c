"""Windows with a fixed number of live requests, and windows of a text as prompts of one length: new ones at every call,
so that no contender has a prompt in its cache."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from tokenizers import Tokenizer

from bench.harness.command import Common
from bench.harness.models import Models
from bench.harness.questions import Question
from bench.harness.runner import Case, Contender, Window
from specdec.runner.files import directory_of

_MEAN_TOKENS = 8
"""Of an answer at least: so short they may be before a window has no further prompt."""


def case_in_window(
    name: str,
    contenders: Sequence[Contender],
    take: Callable[[int], Sequence[Question]],
    *,
    window: Window,
    max_tokens: int,
    repeats: int,
) -> Case:
    """After one turn that warms up, in which the policy learns. ``take`` gives so many questions of one turn each."""
    num_prompts = window.num_live + int(window.num_tokens) // min(_MEAN_TOKENS, max_tokens)
    turns = [take(num_prompts) for _ in range(1 + repeats)]
    return Case(name, turns, contenders, num_warm_ups=1, salt=name, window=window, max_tokens=max_tokens)


class Windows:
    """Windows of a text of ids, or random ids where there is no text."""

    def __init__(self, vocab_size: int, text: Sequence[int] = (), seed: int = 0) -> None:
        self._vocab_size = vocab_size
        self._text = text
        self._random = random.Random(seed)

    def take(self, count: int, length: int) -> list[list[int]]:
        """``count`` prompts of ``length`` ids. Raises ValueError if the text is shorter than that."""
        return [self._one(length) for _ in range(count)]

    def questions(self, count: int, length: int) -> list[Question]:
        """The same as questions. Raises ValueError."""
        return [Question("", prompt={"token_ids": {"token_ids": ids}}) for ids in self.take(count, length)]

    def _one(self, length: int) -> list[int]:
        if not self._text:
            return [self._random.randrange(self._vocab_size) for _ in range(length)]
        if length > len(self._text):
            raise ValueError(f"the text of the questions has {len(self._text)} ids, {length} were asked for")
        start = self._random.randrange(len(self._text) - length + 1)
        return list(self._text[start : start + length])


def windows_of(common: Common, models: Models, seed: int = 0) -> Windows:
    """Of the questions' text by the target's tokenizer; random ids for random weights. Raises ValueError."""
    tokenizer = Tokenizer.from_file(str(directory_of(models.target) / "tokenizer.json"))
    if models.is_random:
        return Windows(tokenizer.get_vocab_size(), seed=seed)
    texts = [str(question.prompt.get("text", "")) or "\n".join(question.turns) for question in common.asked("python")]
    return Windows(tokenizer.get_vocab_size(), tokenizer.encode("\n\n".join(texts)).ids, seed)
