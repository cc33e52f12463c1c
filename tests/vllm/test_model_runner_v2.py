"""Laws of texts hold on vLLM's model runner V2, too, which runs here in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.vllm.loading import load_engine
from specdec.vllm.passes import Proposer
from target_service.vllm_verifier import SAMPLER
from tests.checkout import ROOT
from tests.vllm.conftest import settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
pytest.importorskip("triton")

INTERPRETED = Path(__file__).parent / "interpreted"
TESTS = (
    "test_the_text_is_that_of_plain_transformers",
    "test_texts_that_do_not_fit_together_take_turns",
    "test_a_prompt_is_computed_once_for_all_drafts_of_it",
    "test_logprobs_are_those_of_engine_torch_with_and_without_drafts",
)
"""Of tests/vllm/test_texts.py: chains, texts that are held back and preempted, drafts that are taken back, logprobs."""


def test_laws_of_texts_hold_on_model_runner_v2() -> None:
    """In a process of its own, because vLLM chooses its model runner when it is imported."""
    path = os.pathsep.join(filter(None, [str(INTERPRETED), str(ROOT), os.environ.get("PYTHONPATH")]))
    ids = [f"{ROOT}/tests/vllm/test_texts.py::{name}" for name in TESTS]
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "--override-ini", "filterwarnings=default", *ids],
        env={**os.environ, "PYTHONPATH": path, "VLLM_USE_V2_MODEL_RUNNER": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stdout[-5000:] + finished.stderr[-5000:]


def test_a_target_that_drafts_by_itself_is_refused(
    target_model: str, draft_model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    small = Proposer("draft_model", {"method": "draft_model", "model": draft_model})
    with pytest.raises(ValueError, match=r"model runner V2 a target does not draft by itself \(draft_model\)"):
        load_engine(settings(target_model), SAMPLER, proposer=small)
