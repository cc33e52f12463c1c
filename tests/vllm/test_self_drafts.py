"""Law: what a target on vLLM drafts by itself changes no text. Heads of random weights, and a small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from specdec.vllm.loading import load_engine
from target_service.heads.vllm_proposer import proposer
from target_service.vllm_verifier import SAMPLER, VllmVerifier
from tests.checkout import DEMO
from tests.cluster import cluster
from tests.parity.conftest import Reference
from tests.parity.target_alone import SETTINGS, Case, TargetAlone
from tests.parity.written_heads import DRAFT_VOCAB, eagle_weights, folder, weights
from tests.vllm.conftest import settings
from tests.vllm.test_texts import check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SIZES = {"intermediate_size": 256, "num_key_value_heads": 5, "vocab_size": 4096, "max_position_embeddings": 2048}


def head(at: Path, kind: str) -> str:
    """The folder of a head as vLLM reads it: with all sizes in its configuration."""
    if kind == "draft_model":
        return str(DEMO / "draft")
    at.mkdir()
    tensors = weights() if kind == "eagle3" else eagle_weights()
    if kind == "eagle3":  # the target's rows are its output
        tensors.pop("lm_head.weight")
    else:  # vLLM's layer has no biases
        tensors = {name: tensor for name, tensor in tensors.items() if not name.endswith(".bias")}
    folder(at, "SpecForge", tensors)
    config = json.loads((at / "config.json").read_text())
    architecture = {"eagle3": "LlamaForCausalLMEagle3", "eagle": "LlamaForCausalLM"}[kind]
    config |= SIZES | {"architectures": [architecture], "model_type": "llama", "num_hidden_layers": 1}
    config |= {"draft_vocab_size": DRAFT_VOCAB} if kind == "eagle3" else {}
    (at / "config.json").write_text(json.dumps(config))
    return str(at)


@pytest.fixture(params=["eagle3", "eagle", "draft_model"])
def verifier(request: pytest.FixtureRequest, target_model: str, tmp_path: Path) -> Any:
    """Its worker is a process, because vLLM's passes are those of one model in a process."""
    apart = settings(target_model, vllm={"distributed_executor_backend": "mp"})
    with proposer(head(tmp_path / "head", request.param), "", target_model, "") as chosen:
        verifier = VllmVerifier(*load_engine(apart, SAMPLER, proposer=chosen))
    assert verifier.info.self_draft == request.param
    yield verifier
    verifier._engine.shut_down()


async def test_the_text_is_that_of_plain_transformers(
    verifier: VllmVerifier, reference: Reference, prompts: list[list[int]], near_tie: float
) -> None:
    """While others are cancelled, with none to 8 tokens of each text."""
    cases = [Case(tuple(prompts[number][:24]), number, number) for number in range(len(SETTINGS))]
    async with cluster([verifier]) as deployment:
        await check(deployment, TargetAlone(reference, cases, near_tie), lambda rng: rng.randrange(9))
        fields: dict[str, Any] = {"token_ids": {"token_ids": prompts[0][:24]}, "max_tokens": 40, "num_draft_tokens": 4}
        samples = [(await deployment.client.generate(**fields, seed=seed))[0] for seed in range(2)]
        assert all(sample.finish.speculation.num_draft_tokens for sample in samples)
        if verifier.info.self_draft == "draft_model":
            assert all(sample.finish.speculation.num_accepted_tokens for sample in samples)
        await deployment.settled()
    assert verifier._engine.num_sequences == 0
