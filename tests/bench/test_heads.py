"""bench heads: a target that drafts by itself, in one process, and its texts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from bench.harness.command import Common
from bench.harness.models import PairName
from bench.heads import main


@pytest.mark.slow
def test_trees_and_chains_give_the_target_its_text_in_fewer_passes(tmp_path: Path) -> None:
    common = Common(pair=PairName.demo, questions="python", tokens=24, threads=1, json=tmp_path / "json")
    main(common, [4], "recycling")
    rows = json.loads((tmp_path / "json").read_text())["rows"]
    names = ["target alone", "4 nodes", "4 in a chain"]
    assert [(each["case"], each["contender"]) for each in rows] == [(t, n) for t in ("T = 0", "T = 1") for n in names]
    assert [each["same_as_first"] for each in rows] == [1] * 6
    assert rows[0]["tokens_per_pass"] == 1


def test_a_target_without_a_head_is_refused_in_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as ended:
        main(Common(pair=PairName.demo))
    assert ended.value.exit_code == 1
    assert "this needs a head of the target (--head)" in " ".join(capsys.readouterr().out.split())
