"""bench engines itself, on the bundled pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.engines.__main__ import main
from bench.harness.command import Common
from bench.harness.models import PairName

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def common(tmp_path: Path) -> Common:
    return Common(pair=PairName.demo, tokens=16, threads=1, json=tmp_path / "json")


def test_texts_of_the_services_on_vllm_are_those_of_torch_and_transformers(tmp_path: Path) -> None:
    """Four prompts; status 1 if the texts differ where there is no near tie."""
    main(common(tmp_path), compare_texts=True, prompts=4)
    compared = json.loads((tmp_path / "json").read_text())
    assert compared["holds"]
    assert (compared["num_texts"], compared["num_tokens"] > 100) == (32, True)


def test_every_contender_runs(tmp_path: Path) -> None:
    main(common(tmp_path), only=["vllm"], requests="2", repeats=1)
    rows = json.loads((tmp_path / "json").read_text())["rows"]
    services = ["target alone", "K = 4", "adaptive"]
    assert [(row["case"], row["contender"]) for row in rows] == [
        *(("vllm-lookup, 2", name) for name in ("target alone", "adaptive", "vLLM alone")),
        *(("vllm-draft, 2", name) for name in (*services, "vLLM draft_model")),
        *(("vllm-ngram, 2", name) for name in ("target alone", "adaptive", "vLLM ngram")),
        *(("vllm-inner-draft, 2", name) for name in (*services, "vLLM draft_model")),
    ]
    assert all(run["tokens"] >= 2 * 16 for row in rows for run in row["runs"])
