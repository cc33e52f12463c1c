"""bench never-slower: its cells, the floor, and table models behind the real services."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import typer

from bench import never_slower
from bench.harness.command import Common
from bench.harness.methods import ALONE
from bench.harness.models import PairName
from bench.harness.questions import Question
from bench.harness.runner import Answer, Results, Row, Run
from specdec.cli.main import Engine

CASES = ("1 request of 16 tokens", "4 requests of 16 tokens")


def results_of(seconds: Mapping[str, Mapping[str, list[float]]], differing: list[str]) -> Results:
    """Runs of one token, by case and contender."""
    rows: list[Row] = []
    for case, of_case in seconds.items():
        first: Row | None = None
        for contender, of_runs in of_case.items():
            rows.append(Row(case, contender, [Run(each, [Answer([7])]) for each in of_runs], 1, 1, first=first))
            first = first or rows[-1]
    return Results(rows, differing, num_compared=2)


@pytest.mark.parametrize(("floor", "status"), [(0.0, 0), (0.5, 0), (0.95, 1), (100.0, 1)])
def test_the_lowest_cell_is_named_last_and_below_the_floor_with_status_1(
    floor: float, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A ratio is by the time of all answers: the median of the last one would be 1."""
    alone = {ALONE: [1.0, 1.0, 1.0]}
    seconds = {CASES[0]: alone | {"draft": [0.5, 0.5, 0.5]}, CASES[1]: alone | {"draft": [1.0, 1.0, 4.0]}}
    monkeypatch.setattr(never_slower, "compare", lambda prepare, max_tokens: results_of(seconds, []))
    json_file, ended = tmp_path / "json", 0
    try:
        never_slower.main(Common(json=json_file), floor=floor)
    except typer.Exit as exit_:
        ended = exit_.exit_code
    assert ended == status
    shown = capsys.readouterr().out
    assert [line.split()[-1] for line in shown.splitlines() if line.startswith(CASES)] == ["2.00", "0.50"]
    assert shown.splitlines()[-1].strip() == f"draft, {CASES[1]}: 0.500 x the target alone"
    assert json.loads(json_file.read_text())["ratios"] == {CASES[0]: {"draft": 2.0}, CASES[1]: {"draft": 0.5}}


def test_a_text_that_differs_ends_it_with_status_1_whatever_the_floor(monkeypatch: pytest.MonkeyPatch) -> None:
    results = results_of({CASES[0]: {ALONE: [1.0], "draft": [0.5]}}, ["draft: 'Why?'"])
    monkeypatch.setattr(never_slower, "compare", lambda prepare, max_tokens: results)
    with pytest.raises(typer.Exit) as ended:
        never_slower.main(Common(), floor=0.0)
    assert ended.value.exit_code == 1


def test_on_vllm_the_number_of_equal_texts_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    results = results_of({CASES[0]: {ALONE: [1.0], "draft": [0.5]}}, [])
    monkeypatch.setattr(never_slower, "compare", lambda prepare, max_tokens: results)
    never_slower.main(Common(), engine=Engine.vllm)
    assert "1 of 1 texts are the target alone's" in capsys.readouterr().out


def test_short_answers_are_several_in_a_window_and_all_turns_have_other_questions() -> None:
    questions = itertools.cycle([Question("", (f"{number}",)) for number in range(1000)])
    case = never_slower.case_of([], questions, 4, 16, 2)
    assert (case.name, case.max_tokens, case.num_warm_ups) == (CASES[1], 16, 1)
    assert case.window is not None
    assert (case.window.num_live, case.window.num_tokens) == (4, 4 * 64)
    asked = [question.turns for turn in case.turns for question in turn]
    assert len(asked) == len(set(asked)) >= 3 * (4 + 4 * 64 // 16)


@pytest.mark.slow
def test_table_models_give_equal_texts_in_every_cell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = Common(pair=PairName.table, temperature=[0.7], json=tmp_path / "json")
    never_slower.main(common, floor=0.0, only=["draft"], requests="2", tokens="4,8", repeats=1)
    written = json.loads((tmp_path / "json").read_text())
    cases = [f"2 requests of {tokens} tokens" for tokens in (4, 8)]
    assert [(row["case"], row["contender"]) for row in written["rows"]] == [
        (case, contender) for case in cases for contender in (ALONE, "draft")
    ]
    assert all(row["runs"][0]["tokens"] >= 2 * 64 for row in written["rows"])
    assert (list(written["ratios"]), written["differing"]) == (cases, [])
    assert "compared texts are equal" in capsys.readouterr().out
