"""Prompts for a chat model: forms and topics, a user's file, or questions that the model asks itself.

All are token ids that end where the answer begins.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from models.training.heads.answers import write

HERE = Path(__file__).resolve().parent
MAX_TOKENS = 160
"""Of a question that the model asks."""


def builtin() -> list[str]:
    """Each form with each topic, in a fixed order that mixes both."""
    forms = (HERE / "forms.txt").read_text().splitlines()
    topics = (HERE / "topics.txt").read_text().splitlines()
    questions = [form.replace("{}", topic) for topic in topics for form in forms]
    random.Random(1).shuffle(questions)
    return questions


def of_file(file: Path) -> list[str]:
    """One question per line: JSON with the key prompt. Raises ValueError with the number of a line that is not."""
    questions = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            questions.append(str(json.loads(line)["prompt"]))
        except (json.JSONDecodeError, KeyError, TypeError) as error:
            raise ValueError(f'{file}, line {number}: expected {{"prompt": "..."}}') from error
    return questions


def as_prompt(tokenizer: Any, question: str) -> list[int]:
    """The question as a user's message of the model's chat template."""
    messages = [{"role": "user", "content": question}]
    encoded = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
    return [int(token) for token in encoded["input_ids"]]


def opening(tokenizer: Any) -> list[int]:
    """The chat template up to where the user's words begin. What the model writes there is a question of its own."""
    mark = "\N{WHITE SQUARE}"
    text: str = tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    return [int(token) for token in tokenizer(text[: text.index(mark)], add_special_tokens=False)["input_ids"]]


class Prompts:
    """``data``: builtin, or the file of a user's"""

    def __init__(self, model: Any, tokenizer: Any, data: str, at_once: int) -> None:
        self._model, self._tokenizer, self._at_once = model, tokenizer, at_once
        self._is_builtin = data == "builtin"
        self._questions = builtin() if self._is_builtin else of_file(Path(data))
        self._opening = opening(tokenizer)

    def batches(self, number: int) -> Iterator[list[list[int]]]:
        """Batches of prompts without end, from the one of this number on. Every third one of builtin data has
        questions that the model asks itself."""
        while True:
            if self._is_builtin and number % 3 == 2:
                chosen = self._asked_by_model()
            else:
                start = (number - number // 3 if self._is_builtin else number) * self._at_once
                indices = range(start, start + self._at_once)
                chosen = [self._questions[index % len(self._questions)] for index in indices]
            number += 1
            if chosen:
                yield [as_prompt(self._tokenizer, question) for question in chosen]

    def _asked_by_model(self) -> list[str]:
        written = write(self._model, [self._opening] * self._at_once, MAX_TOKENS, 1.0)
        whole = [text.answer for text in written if len(text.answer) < MAX_TOKENS]
        decoded = [self._tokenizer.decode(ids, skip_special_tokens=True).strip() for ids in whole]
        return [question for question in decoded if question]
