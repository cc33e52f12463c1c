"""What a user sees of results: tables that fit 80 columns, files, charts, and an exit status."""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console

from bench.harness.command import Common
from bench.harness.questions import Question
from bench.harness.report import USUAL_COLUMNS, Lines, Panel, by_case, compare, finish, heat_of, matrix
from bench.harness.runner import Answer, Case, Contender, Request, Results, Row, Run
from specdec.v1.generation_pb2 import SpeculationStats


def run(seconds: float, rounds: int = 0, drafted: int = 0) -> Run:
    stats = SpeculationStats(num_rounds=rounds, num_draft_tokens=drafted, num_accepted_tokens=drafted // 2)
    return Run(seconds, [Answer([0] * 20, "text", stats)])


def results(differing: list[str]) -> Results:
    alone = Row("1 request", "alone", [run(1.0, 20)], 1, 1)
    draft = Row("1 request", "draft", [run(0.5, 11, 40)], 1, 1, first=alone)
    return Results([alone, draft], differing, num_compared=2)


def lines_of(table: object, width: int = 80) -> list[str]:
    text = StringIO()
    Console(file=text, width=width).print(table)
    return text.getvalue().splitlines()


def test_a_matrix_of_many_methods_and_13_tasks_fits_80_columns() -> None:
    tasks = [f"{word}_{number}" for number, word in enumerate(["summarization", "qa", "math_reasoning"] * 4)]
    figures = {name: dict.fromkeys([*tasks, "rag"], 1.5) for name in ("head and draft", "lookahead")}
    shown = lines_of(matrix(figures | {"one": {"rag": 150.2}}))
    assert max(map(len, shown)) <= 80
    assert ["head", "and", "draft", *["1.50"] * 13] in [line.split() for line in shown]
    assert shown[-1].split() == ["one", "150"]


def test_a_line_has_its_figures_and_a_column_without_any_is_left_out() -> None:
    measured = results([])
    shown = [line.split() for line in lines_of(by_case(measured, USUAL_COLUMNS))]
    assert shown[0] == ["tokens/s", "over", "first", "per", "pass", "drafted", "accepted", "same"]
    assert shown[1] == ["1", "request"]
    assert shown[3] == ["draft", "40.0", "2.00", "x", "1.82", "4.0", "0.50", "1/1"]
    plain = Results([Row("", "alone", [run(1.0)], 1, 1)])
    assert lines_of(by_case(plain, USUAL_COLUMNS))[0].split() == ["tokens/s", "over", "first", "same"]


@pytest.mark.parametrize("differing", [[], ["1 request, draft: 'Why?'"]])
def test_texts_that_differ_are_told_with_status_1_behind_all_figures(
    differing: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured, common = results(differing), Common(json=tmp_path / "figures.json")
    status = 0
    try:
        finish(common, measured, {"Title": matrix({"draft": {"qa": 1.5}})}, heat_of("", measured), "legend", extra=1)
    except typer.Exit as ended:
        status = ended.exit_code
    shown = capsys.readouterr().out
    assert status == len(differing)
    assert ("1 of 2 texts DIFFER" in shown) == bool(differing)
    assert ("All 2 compared texts are equal." in shown) == (not differing)
    assert "Title" in shown
    assert "1.50" in shown
    written = json.loads(common.json.read_text()) if common.json else {}
    assert [(row["contender"], row["over_first"]) for row in written["rows"]] == [("alone", 1.0), ("draft", 2.0)]
    assert (written["differing"], written["extra"]) == (differing, 1)


def test_what_cannot_be_measured_ends_the_command_with_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    @asynccontextmanager
    async def prepare(directory: Path, say: object):
        raise ValueError("there is no such model")
        yield []

    with pytest.raises(typer.Exit) as ended:
        compare(prepare, 9)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().out.split("\n")[0] == "there is no such model"


def test_a_comparison_says_its_conditions_and_returns_all_rows(capsys: pytest.CaptureFixture[str]) -> None:
    async def ask(request: Request) -> Run:
        return run(1.0)

    @asynccontextmanager
    async def prepare(directory: Path, say):
        say("some models; 2 cores")
        yield [Case("qa", [[Question("qa", ("?",))]], [Contender("alone", ask)])]

    assert [row.contender for row in compare(prepare, 9).rows] == ["alone"]
    assert "some models; 2 cores" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "start"), [("t.png", b"\x89PNG"), ("t.svg", b"<?xml")])
def test_charts_are_drawn(name: str, start: bytes, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    measured = results([])
    panel = Panel("speed", "requests", {"draft": [(8.0, 1.5), (1.0, 2.0)], "one": [(1.0, 1.0)]})
    for chart in (heat_of("Speed", measured), Lines("Speed", [panel] * 3), Lines("", [panel], logarithmic=True)):
        finish(Common(chart=tmp_path / name), measured, {}, chart)
        assert (tmp_path / name).read_bytes().startswith(start)
