"""Target and draft take the tokens that a pass has drawn: nothing is drawn twice, and the tokens are the same."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from draft_service.drafter import DraftSequence
from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.core.rounds import ModelInfo, TargetOpen
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import TokenTree
from specdec.runner.model_runner import ModelRunner
from target_service.language_model import LmVerifier
from target_service.verifier import Job
from tests.models.backends import backend
from tests.specdec.backends.avx512.common_layers import CONTEXT, TAKEN, VOCAB, model_of

PARAMS = {
    "greedy": SamplingParams(0.0),
    "coupled": SamplingParams(0.9),
    "with a filter": SamplingParams(0.9, top_k=5),
    "with a penalty": SamplingParams(0.9, repetition_penalty=1.3),
}


@pytest.fixture
def runners() -> dict[str, ModelRunner]:
    torch.set_num_threads(1)
    info = ModelInfo("tiny", "", VOCAB, "", CONTEXT)
    return {
        name: ModelRunner(model_of(TAKEN["llama"], torch.float32), info, 2048, backend(name))
        for name in ("cuda", "torch")
    }


def counted(runner: ModelRunner, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often something is drawn outside of passes."""
    counts: Counter[str] = Counter()
    draw = runner.backend.draw
    monkeypatch.setattr(runner.backend, "draw", lambda *given: counts.update(["draw"]) or draw(*given))
    return counts


@pytest.mark.parametrize("name", PARAMS)
def test_a_target_draws_once(runners: dict[str, ModelRunner], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec, tree = SequenceSpec((5, 6, 7), 3, PARAMS[name], seed=4), TokenTree.chain([9, 11])
    counts = counted(runners["cuda"], monkeypatch)

    def decided(runner: ModelRunner) -> list[Any]:
        verifier = LmVerifier(runner)
        state, decisions = verifier.open(spec), []
        for ids in ([5, 6, 7], [5, 6, 7, 9, 8]):
            [decision], _ = verifier.verify([Job(TargetOpen(spec), state, ids, tree)])
            decisions.append(decision)
        return decisions

    assert decided(runners["cuda"]) == decided(runners["torch"])
    assert counts["draw"] == (2 if name.startswith("with") else 0)


@pytest.mark.parametrize("name", PARAMS)
def test_a_draft_draws_a_chain_in_one_pass(
    runners: dict[str, ModelRunner], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, counts = SequenceSpec((5, 6, 7), 3, PARAMS[name], seed=4), counted(runners["cuda"], monkeypatch)
    chains = {}
    for kind, runner in runners.items():
        drafter = LanguageModelDrafter(runner)
        sequence = DraftSequence(spec, list(spec.token_ids), state=drafter.open(spec))
        sequence.num_wanted = 5
        grown: list[Any] = []
        passes = 0
        while len(grown) < 5:
            [candidates] = drafter.grow([sequence])
            assert candidates
            grown += candidates
            passes += 1
            sequence.tree = sequence.tree.extended(candidates)
            sequence.num_wanted = 5 - len(grown)
        chains[kind] = [candidate.token_id for candidate in grown]
        is_plain = not name.startswith("with")
        assert passes == (1 if kind == "cuda" and is_plain else 5)
    assert chains["cuda"] == chains["torch"]
    assert counts["draw"] == (0 if is_plain else 5)
