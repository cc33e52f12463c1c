"""The questions of each task: our own of questions.json, or those of a file in the form of Spec-Bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

_OURS = Path(__file__).with_name("questions.json")


class Question(NamedTuple):
    """What a user says in each turn of a chat."""

    task: str
    turns: tuple[str, ...]


def read_questions(file: Path | None, per_task: int, num_turns: int | None = None) -> list[Question]:
    """``per_task`` of each at most, with ``num_turns`` at most. ``file`` has a line of JSON with "category" and
    "turns" for each; None: ours. Raises ValueError if it has another form."""
    found: dict[str, list[tuple[str, ...]]] = {}
    if file is None:
        ours = json.loads(_OURS.read_text())
        found = {task: [(text,) for text in texts] for task, texts in ours.items()}
    else:
        try:
            for line in file.read_text().splitlines():
                question = json.loads(line)
                first, *later = question["turns"]
                found.setdefault(question["category"], []).append((first, *later))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{file}: a line is not JSON with category and turns: {error}") from error
    return [Question(task, turns[:num_turns]) for task, all_turns in found.items() for turns in all_turns[:per_task]]
