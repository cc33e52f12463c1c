"""bench priorities: its table of medians and longest gaps, over each kind alone; a wrong text ends it with 1."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from rich.console import Console

from bench import priorities
from bench.priorities import Measured

ALONE = [Measured(10.0, 50.0, 800.0, 0.0, 0.0, 0.0, 0), Measured(10.0, 60.0, 800.0, 0.0, 0.0, 0.0, 0)]
BATCH = [Measured(0.0, 0.0, 0.0, 20.0, 70.0, 400.0, 0)] * 2
BOTH = [Measured(11.0, 90.0, 700.0, 30.0, 80.0, 240.0, 0), Measured(13.0, 40.0, 700.0, 30.0, 95.0, 280.0, 0)]
MEASURED = {"interactive alone": ALONE, "batch alone": BATCH, "both": BOTH}


def test_the_table_has_medians_over_each_kind_alone_and_the_longest_gaps(capsys: pytest.CaptureFixture[str]) -> None:
    Console(width=100).print(priorities.shown(MEASURED))
    *_, alone, batch, both = capsys.readouterr().out.rstrip().splitlines()
    assert alone.split() == ["interactive", "alone", "10.0", "1.00", "x", "60", "ms"]
    assert batch.split() == ["batch", "alone", "400", "1.00", "x", "70", "ms"]
    assert both.split() == ["both", "12.0", "1.20", "x", "90", "ms", "260", "0.65", "x", "95", "ms"]


@pytest.mark.parametrize(("num_wrong", "status"), [(0, 0), (1, 1)])
def test_a_wrong_text_ends_it_with_1_and_the_figures_are_written(
    num_wrong: int, status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def measure(*_: int) -> dict[str, list[Measured]]:
        return {**MEASURED, "both": [BOTH[0], Measured(13.0, 40.0, 700.0, 30.0, 95.0, 280.0, num_wrong)]}

    monkeypatch.setattr(priorities, "measure", measure)
    ended = 0
    try:
        priorities.main(json_file=tmp_path / "json")
    except typer.Exit as exit_:
        ended = exit_.exit_code
    assert ended == status
    assert json.loads((tmp_path / "json").read_text())["both"][1]["wrong_texts"] == num_wrong
