"""The comparison of drafts: their sizes, one that is measured beside its target, and how the figures look."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from bench.drafts.__main__ import tables
from bench.drafts.chart import draw
from bench.drafts.measuring import NUMBERS, Figure, Figures, measure, num_parameters, read_prompts
from tests.checkout import DEMO


def figures(speed: float) -> Figures:
    return {number: Figure(0.5, 1.0 + (number or 3) / 2, speed) for number in NUMBERS}


def test_a_checkpoint_has_as_many_parameters_as_its_tensors_have_numbers(tmp_path: Path) -> None:
    assert num_parameters(DEMO / "draft") == 926_336
    with pytest.raises(ValueError, match="is no checkpoint"):
        num_parameters(tmp_path)


@pytest.mark.parametrize("content", ["[]", "{}", '["def"]', "def", '[{"prompt": "def"}]'])
def test_a_file_without_prompts_is_refused(content: str, tmp_path: Path) -> None:
    assert len(read_prompts(DEMO / "prompts.json")) > 20
    (tmp_path / "prompts.json").write_text(content)
    for file in ("prompts.json", "none.json"):
        with pytest.raises(ValueError, match=file):
            read_prompts(tmp_path / file)


def test_tables_have_a_row_for_each_draft_in_80_columns() -> None:
    text = StringIO()
    for table in tables([("draft", 1_000_000), ("draft", 5_000_000)], 10_000_000, [figures(1.2), figures(0.8)]):
        Console(file=text, width=80).print(table)
    lines = text.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if "M  " in line] == ["draft"] * 6
    assert sum("1.20 x" in line for line in lines) == 1
    assert "2.14 x" in lines[-2], "3 tokens in one pass of the target and four of a tenth"


def test_a_chart_is_drawn_whatever_the_order_of_sizes(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    draw([0.3, 0.08], [figures(0.9), figures(1.3)], tmp_path / "drafts.svg")
    assert "Tokens per round" in (tmp_path / "drafts.svg").read_text()


@pytest.mark.slow
async def test_the_bundled_draft_is_measured_beside_its_target() -> None:
    done: list[None] = []
    [found] = await measure(
        DEMO / "target", [DEMO / "draft"], ["def main(", "import "], 16, 1, lambda: done.append(None)
    )
    assert len(done) == 3
    assert 0 < found[1].acceptance <= 1
    assert 1 < found[4].length <= 5
    assert all(each.speed > 0 for each in found.values())
