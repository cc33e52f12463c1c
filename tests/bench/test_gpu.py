"""The stages for a GPU run on a CPU as well, with small sizes; their figures mean nothing there."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="the extra gpu is not installed")

from bench.gpu import engine, kernels, run


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.slow
def test_rows_keep_their_bits_in_any_company_and_chunks() -> None:
    table = engine.company()
    assert len(table) == 6
    assert not any(row["rows with other bits"] for row in table)


@pytest.mark.slow
def test_attention_is_compared_with_float64() -> None:
    [row] = kernels.attention()
    assert isinstance(row["error"], float)
    assert row["error"] < 1e-5
    assert row["changed whole"] == row["changed in halves"] == 0


def test_a_table_is_printed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    rows = [{"rows": 1, "us": 3.14159}, {"rows": 16, "note": "slow"}]
    run.show("stage", rows)
    assert capsys.readouterr().out == "rows     us  note\n   1  3.142      \n  16         slow\n"
    assert json.loads((tmp_path / "stage.json").read_text()) == rows


def test_a_stage_that_there_is_not_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["run", "profle"])
    with pytest.raises(SystemExit):
        run.main()
    assert "there is no stage profle" in capsys.readouterr().err


@pytest.mark.slow
def test_a_stage_that_fails_or_hangs_leaves_the_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(run.STAGES, "profile", (0, engine.profile))
    monkeypatch.setattr(sys, "argv", ["run", "profile", "draw"])
    with pytest.raises(SystemExit, match="failed: profile"):
        run.main()
    output = capfd.readouterr().out
    assert "profile: not done after 0 s" in output
    assert "kernels run on a GPU alone" in output
