"""The questions of bench tasks, and its table. The models themselves are not in the repository."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from bench.tasks.__main__ import ALONE, Answered, read_questions, table_of


def test_our_questions_are_eight_tasks_of_eight() -> None:
    assert set(Counter(task for task, _ in read_questions(None, 99)).values()) == {8}
    assert len(read_questions(None, 2)) == 16


def test_questions_of_spec_bench_are_read(tmp_path: Path) -> None:
    file = tmp_path / "questions.jsonl"
    lines = [{"question_id": n, "category": "qa", "turns": [f"What is {n}?", "And now?"]} for n in range(3)]
    file.write_text("\n".join(map(json.dumps, lines)))
    assert read_questions(file, 2) == [("qa", "What is 0?"), ("qa", "What is 1?")]
    file.write_text('{"category": "qa"}')
    with pytest.raises(ValueError, match="a line is not JSON with category and turns"):
        read_questions(file, 2)


def test_a_figure_is_the_median_over_questions_beside_the_target_alone() -> None:
    found = []
    for seconds in (1.0, 2.0, 4.0):
        found += [Answered("qa", ALONE, seconds, 20, 20), Answered("qa", "draft", seconds / 2, 20, 10)]
    found[-1] = Answered("qa", "draft", 400.0, 20, 5)
    _, figures = table_of(found)
    length, speed = figures["qa"]["draft"]
    assert speed == 2.0
    assert length == pytest.approx((2 + 2 + 4) / 3)
