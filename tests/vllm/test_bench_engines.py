"""bench engines itself, on the bundled pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.engines.__main__ import main
from bench.engines.pairs import PairName
from bench.engines.table import RATIOS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_texts_of_the_services_on_vllm_are_those_of_torch_and_transformers(tmp_path: Path) -> None:
    """Four prompts; status 1 if the texts differ where there is no near tie."""
    told = tmp_path / "told.json"
    main(PairName.bundled, compare_texts=True, quick=True, json_file=str(told))
    found = json.loads(told.read_text())
    assert found["holds"]
    assert (found["num_texts"], found["num_tokens"] > 100) == (8, True)


def test_every_contender_runs(tmp_path: Path) -> None:
    told = tmp_path / "told.json"
    main(PairName.bundled, quick=True, streams=[2], json_file=str(told))
    found = json.loads(told.read_text())
    assert found["ratios"].keys() == {f"{name}_2" for name in RATIOS}
    assert all(run["outputs"] for row in found["rows"] for run in row["runs"])
