"""bench drafts: sizes of drafts, and what their rounds are worth by them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.drafts import ALONE, NUMBERS, by_parameters, main, num_parameters, sizes_of, tables
from bench.harness.command import Common
from bench.harness.models import Models
from bench.harness.runner import Answer, Results, Row, Run
from specdec.v1.generation_pb2 import SpeculationStats
from tests.checkout import DEMO


def row(case: str, contender: str, tokens_per_pass: int) -> Row:
    stats = SpeculationStats(num_rounds=4)
    return Row(case, contender, [Run(1.0, [Answer([0] * 4 * tokens_per_pass, stats=stats)])])


def test_a_checkpoint_has_as_many_parameters_as_its_tensors_have_numbers(tmp_path: Path) -> None:
    assert num_parameters(str(DEMO / "draft")) == 926_336
    assert sizes_of(Models("", "T", (str(DEMO / "draft"),))) == {"draft": 926_336}
    for missing in (tmp_path, tmp_path / "none"):
        with pytest.raises(ValueError, match=str(missing)):
            num_parameters(str(missing))


def test_the_speed_by_parameters_is_that_of_a_pass_that_takes_as_long_as_its_model_is_large() -> None:
    names = [f"K = {number}" for number in NUMBERS]
    rows = [row("small", ALONE, 1), *(row("small", name, 3) for name in names), row("small", "chosen", 2)]
    by_size = by_parameters(Results(rows), {"small": 0.1})
    assert by_size["K = 4"]["small"] == pytest.approx(3 / 1.4), "in one pass of the target and four of a tenth"
    assert len(tables(Results(rows), {"small": 0.1})) == 4
    assert len(tables(Results(rows), {})) == 3, "the size of a running deployment's draft is unknown"


@pytest.mark.slow
def test_the_bundled_draft_is_measured_next_to_its_target(tmp_path: Path) -> None:
    main(Common(per_task=2, tokens=16, threads=1, json=tmp_path / "json", chart=tmp_path / "chart.svg"))
    written = json.loads((tmp_path / "json").read_text())
    lengths = {each["contender"]: each["tokens_per_pass"] for each in written["rows"]}
    assert 1 < lengths["K = 4"] <= 5
    assert lengths[ALONE] == 1
    assert written["shares"]["draft"] == pytest.approx(0.0825, abs=0.001)
    assert (tmp_path / "chart.svg").exists()
