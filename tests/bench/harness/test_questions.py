"""Questions by name: those of the repository, and files in the formats of their authors."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest

from bench.harness.questions import Question, read_questions


def test_our_questions_are_eight_tasks_of_eight() -> None:
    assert set(Counter(each.task for each in read_questions("builtin")).values()) == {8}
    assert len(read_questions("builtin", per_task=2)) == 16
    assert len(read_questions("python")) > 20


@pytest.mark.parametrize("name", ["spec-bench", "mt-bench"])
def test_questions_of_spec_bench_and_mt_bench_are_read_with_their_turns(name: str, tmp_path: Path) -> None:
    file = tmp_path / "question.jsonl"
    lines = [{"question_id": n, "category": "qa", "turns": [f"What is {n}?", "And now?"]} for n in range(3)]
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert read_questions(f"{name}={file}", 2) == [Question("qa", (f"What is {n}?", "And now?")) for n in range(2)]
    assert read_questions(f"{name}={file}", 1, num_turns=1) == [Question("qa", ("What is 0?",))]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_functions_of_humaneval_are_continued_as_they_are(suffix: str, tmp_path: Path) -> None:
    line = json.dumps({"task_id": "HumanEval/0", "prompt": "def f(x):\n", "entry_point": "f"}).encode()
    file = tmp_path / f"HumanEval{suffix}"
    file.write_bytes(gzip.compress(line) if suffix.endswith(".gz") else line)
    [question] = read_questions(f"humaneval={file}")
    assert question.prompt_after([]) == {"text": "def f(x):\n"}
    assert question.num_turns == 1


@pytest.mark.parametrize("line", ['{"category": "qa"}', '{"category": "qa", "turns": []}', "[]", "no JSON"])
def test_a_line_of_another_form_is_refused(line: str, tmp_path: Path) -> None:
    (tmp_path / "question.jsonl").write_text(line)
    with pytest.raises(ValueError, match="a line is not in the format of spec-bench"):
        read_questions(f"spec-bench={tmp_path / 'question.jsonl'}")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("other", "there are no questions 'other': --questions builtin | python | spec-bench=FILE"),
        ("mt-bench", "mt-bench needs the file of its authors: --questions"),
        ("mt-bench=/none", "/none cannot be read: No such file"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(name: str, why: str) -> None:
    with pytest.raises(ValueError, match=why.replace("|", r"\|")):
        read_questions(name)


def test_a_later_turn_follows_the_answers_to_all_before() -> None:
    question = Question("qa", ("One?", "Two?", "Three?"))
    messages = question.prompt_after(["1", "2"])["chat"]["messages"]
    assert [(each["role"], each["content"]) for each in messages] == [
        ("user", "One?"),
        ("assistant", "1"),
        ("user", "Two?"),
        ("assistant", "2"),
        ("user", "Three?"),
    ]
