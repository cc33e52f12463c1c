"""Prompts for a chat model: forms and topics that we wrote, a user's file, or questions that the model asks itself.

All are token ids that end where the answer begins.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


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
