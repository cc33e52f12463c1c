"""The questions of bench tasks, and its table. The models themselves are not in the repository."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import typer

from bench.load import formula
from bench.tasks.__main__ import ALONE, Answered, main, read_questions, table_of
from bench.tasks.chart import draw


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


def test_an_unknown_method_is_refused_by_name() -> None:
    with pytest.raises(typer.BadParameter, match="there is no method else: lookup, history"):
        main(methods="lookup,else")


def test_the_chart_is_drawn(tmp_path: Path) -> None:
    draw(
        {"qa": {"lookup": (1.2, 1.1), "head": (2.0, 0.5)}, "math": {"lookup": (1.0, 1.0), "head": (2.4, 1.7)}},
        "",
        tmp_path / "t.png",
    )
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")


def test_the_formula_gives_less_at_more_load_and_never_less_than_the_target_alone() -> None:
    for method in ("lookup", "draft", "head"):
        ratios = [formula(method, requests, 160) for requests in (1, 8, 32, 128, 4096)]
        assert ratios == sorted(ratios, reverse=True)
        assert ratios[0] > 1.8
        assert ratios[-1] == pytest.approx(1.0, abs=0.05)
