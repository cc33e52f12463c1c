"""Laws of texts hold on vLLM's model runner V2, too, which runs here in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.vllm import engine
from specdec.vllm.passes import Proposer
from tests.checkout import ROOT

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
    """In a process of its own, because vLLM chooses its model runner when it is imported. Without the warm-up, in which
    vLLM's sampler draws from what happens to be in memory: the interpreter stops at NaN."""
    path = os.pathsep.join(filter(None, [str(INTERPRETED), str(ROOT), os.environ.get("PYTHONPATH")]))
    ids = [f"{ROOT}/tests/vllm/test_texts.py::{name}" for name in TESTS]
    finished = subprocess.run(
        [sys.executable, "-m", "pytest", "--override-ini", "filterwarnings=default", *ids],
        env={**os.environ, "PYTHONPATH": path, "VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_CPU_CI_ENV": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert finished.returncode == 0, finished.stdout[-5000:] + finished.stderr[-5000:]


@pytest.mark.parametrize(
    ("proposer", "num_stages", "lora", "words"),
    [
        (Proposer("mtp", {"method": "mtp"}), 1, None, r"a target does not draft by itself \(mtp\)"),
        (None, 1, object(), "there are no adapters"),
        (None, 2, None, "there are no pipeline stages"),
    ],
)
def test_what_v2_cannot_do_is_refused(
    monkeypatch: pytest.MonkeyPatch, proposer: Proposer | None, num_stages: int, lora: object, words: str
) -> None:
    parallel = SimpleNamespace(pipeline_parallel_size=num_stages)
    config = SimpleNamespace(use_v2_model_runner=True, parallel_config=parallel, lora_config=lora)
    monkeypatch.setattr(engine, "_config_with", lambda *_, **__: config)
    with pytest.raises(ValueError, match=words):
        engine.lend_workers({}, max_chain=4, num_slots=0, proposer=proposer)
