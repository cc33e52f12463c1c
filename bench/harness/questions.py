"""The questions that benchmarks ask: those of this repository, or a file in the format of its authors."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from specdec.cli.demo import MODELS

_BUILTIN = Path(__file__).with_name("questions.json")


@dataclass(frozen=True, slots=True)
class Question:
    """What a user says in each turn of a chat; or a prompt as it is, in fields of GenerateRequest."""

    task: str
    turns: tuple[str, ...] = ()
    prompt: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_turns(self) -> int:
        return len(self.turns) or 1

    def prompt_after(self, answers: Sequence[str]) -> Mapping[str, Any]:
        """The prompt of the next turn of a chat, behind the ``answers`` to all turns before."""
        if not self.turns:
            return self.prompt
        said = [{"role": "user", "content": turn} for turn in self.turns[: len(answers) + 1]]
        answered = [{"role": "assistant", "content": answer} for answer in answers]
        messages = [message for pair in zip(said, answered, strict=False) for message in pair]
        return {"chat": {"messages": [*messages, said[-1]]}}


def _chats(line: Mapping[str, Any]) -> Question:
    """The format of Spec-Bench and of MT-Bench."""
    first, *later = line["turns"]
    return Question(line["category"], (str(first), *map(str, later)))


def _programs(line: Mapping[str, Any]) -> Question:
    """The format of HumanEval: a function to be continued."""
    return Question("humaneval", prompt={"text": str(line["prompt"])})


FORMATS: Mapping[str, Callable[[Mapping[str, Any]], Question]] = {
    "spec-bench": _chats,
    "mt-bench": _chats,
    "humaneval": _programs,
}
NAMES = ("builtin", "python", *(f"{name}=FILE" for name in FORMATS))


def read_questions(name: str, per_task: int | None = None, num_turns: int | None = None) -> list[Question]:
    """``name`` is one of NAMES. ``per_task`` questions of each task at most, with ``num_turns`` turns at most.

    Raises ValueError, with a message for the user, for another name, or a file that is not in its format.
    """
    kind, _, file = name.partition("=")
    if name == "builtin":
        tasks = json.loads(_BUILTIN.read_text())
        questions = [Question(task, (text,)) for task, texts in tasks.items() for text in texts]
    elif name == "python":
        questions = [Question("python", prompt={"text": text}) for text in python_texts()]
    elif kind in FORMATS and file:
        questions = _of_file(Path(file), kind)
    else:
        why = f"{kind} needs the file of its authors" if kind in FORMATS else f"there are no questions {name!r}"
        raise ValueError(f"{why}: --questions {' | '.join(NAMES)}")
    by_task: dict[str, list[Question]] = {}
    for question in questions:
        by_task.setdefault(question.task, []).append(question)
    kept = [question for of_task in by_task.values() for question in of_task[:per_task]]
    return [Question(question.task, question.turns[:num_turns], question.prompt) for question in kept]


def python_texts() -> list[str]:
    """Beginnings of Python source that the demo pair was not trained on."""
    return [str(prompt["text"]) for prompt in json.loads((MODELS / "prompts.json").read_text())]


def _of_file(file: Path, kind: str) -> list[Question]:
    try:
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        questions = [FORMATS[kind](json.loads(line)) for line in content.splitlines() if line.strip()]
    except OSError as error:
        raise ValueError(f"{file} cannot be read: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, EOFError) as error:
        raise ValueError(f"{file}: a line is not in the format of {kind}: {error!r}") from error
    if not questions:
        raise ValueError(f"{file} has no question")
    return questions
