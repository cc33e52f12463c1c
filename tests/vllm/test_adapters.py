"""Law: with an adapter the text is that of plain transformers with the adapter merged into its weights."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draft_service.drafters.vllm_drafter import SAMPLER as DRAFT_SAMPLER
from draft_service.drafters.vllm_drafter import VllmDrafter
from specdec.client import Client
from specdec.core.errors import InvalidArgument
from specdec.core.settings import VllmSettings
from specdec.vllm import loading
from specdec.vllm.loading import load_engine
from target_service.heads.vllm_proposer import proposer
from target_service.vllm_verifier import SAMPLER, VllmVerifier
from tests.cluster import cluster
from tests.parity.conftest import Reference
from tests.parity.target_alone import SETTINGS, Case, TargetAlone
from tests.vllm.conftest import settings
from tests.vllm.test_self_drafts import head

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ADAPTERS = {"tall": (4, ("q_proj", "v_proj", "down_proj")), "wide": (9, ("o_proj", "gate_proj", "up_proj"))}
"""The rank of each, and the modules that it changes."""
SCALE = 2.0


def weights(model: torch.nn.Module, seed: int, rank: int, changed: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """The matrices A and B of each module, random."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, module in model.named_modules():
        if name.endswith(changed):
            rows, columns = module.weight.shape
            for part, shape in (("A", (rank, columns)), ("B", (rows, rank))):
                tensors[f"{name}.lora_{part}.weight"] = 0.08 * torch.randn(shape, generator=generator)
    return tensors


def merge(reference: Reference, tensors: Mapping[str, torch.Tensor]) -> Reference:
    for name, module in reference.model.named_modules():
        if (a := tensors.get(f"{name}.lora_A.weight")) is not None:
            module.weight.data += SCALE * tensors[f"{name}.lora_B.weight"] @ a
    return reference


def save(directory: Path, rank: int, changed: tuple[str, ...], tensors: Mapping[str, torch.Tensor]) -> str:
    """In peft's format."""
    directory.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": SCALE * rank, "target_modules": changed}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(named, directory / "adapter_model.safetensors")
    return str(directory)


@pytest.fixture(scope="module")
def references(reference: Reference, device: str) -> dict[str, Reference]:
    """By adapter. The one without a name is the target itself."""
    merged = {
        name: merge(Reference(device), weights(reference.model, number, *shape))
        for number, (name, shape) in enumerate(ADAPTERS.items())
    }
    return {"": reference, **merged}


@pytest.fixture(scope="module")
def directories(reference: Reference, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("adapters")
    return {
        name: save(root / name, *shape, weights(reference.model, number, *shape))
        for number, (name, shape) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="module")
def verifier(load, target_model: str, directories: dict[str, str]) -> VllmVerifier:
    """In one thread: vLLM computes adapters in many small steps, for each of which threads would wait."""
    return VllmVerifier(*load(settings(target_model, threads=1, vllm={"adapters": directories}), SAMPLER))


@pytest.fixture(scope="module")
def alone(references: dict[str, Reference], prompts: list[list[int]], near_tie: float) -> dict[str, TargetAlone]:
    """Equal requests for all adapters."""
    cases = [Case(tuple(prompts[number][:24]), number, number) for number in range(0, len(SETTINGS), 2)]
    return {name: TargetAlone(of, cases, near_tie) for name, of in references.items()}


async def check(client: Client, alone: Mapping[str, TargetAlone]) -> None:
    """All at a time, with none to 8 draft tokens in a round."""
    rng, together = random.Random(3), asyncio.Semaphore(12)

    async def one(name: str, case: Case) -> int:
        async with together:
            [sample] = await client.generate(**case.request, adapter=name, num_draft_tokens=rng.randrange(9))
        return alone[name].diverges(case, sample.token_ids)

    asked = [(name, case) for name, of in alone.items() for case in of.texts]
    rng.shuffle(asked)
    assert sum(await asyncio.gather(*(one(name, case) for name, case in asked))) <= 1, "divergences at near ties"


async def test_each_request_has_the_text_of_its_adapter(
    verifier: VllmVerifier, load, draft_model: str, alone: dict[str, TargetAlone]
) -> None:
    assert verifier.info.adapters == ("tall", "wide")
    for name in ADAPTERS:
        pairs = zip(alone[name].texts.values(), alone[""].texts.values(), strict=True)
        assert sum(text != plain for text, plain in pairs) > 5, "an adapter that changes nothing proves nothing"
    apart = settings(draft_model, vllm={"distributed_executor_backend": "mp"})
    async with cluster([verifier], [VllmDrafter(*load(apart, DRAFT_SAMPLER))]) as deployment:
        await check(deployment.client, alone)
        with pytest.raises(InvalidArgument, match=r"no adapter has the name 'long'; there are tall, wide"):
            await deployment.client.generate(token_ids={"token_ids": [1]}, max_tokens=1, adapter="long")
        await deployment.settled()


async def test_a_cached_prompt_and_its_logprobs_are_those_of_an_adapter(
    verifier: VllmVerifier, references: dict[str, Reference]
) -> None:
    prompt = [(7 * i) % 4093 for i in range(300)]
    asked: dict[str, Any] = {"token_ids": {"token_ids": prompt}, "max_tokens": 4}
    async with cluster([verifier]) as deployment:
        for name, expected in references.items():
            samples = [(await deployment.client.generate(**asked, adapter=name))[0] for _ in range(2)]
            assert [sample.finish.usage.cached_prompt_tokens for sample in samples] == [0, 256], name
            logprobs: list[float] = []
            async for response in deployment.client.stream(**asked, adapter=name, prompt_logprobs=0):
                logprobs += response.prompt.logprobs.logprobs
            rows = expected.model(input_ids=torch.tensor([prompt[:-1]])).logits[0].log_softmax(-1)
            theirs = rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0]
            assert logprobs == pytest.approx(theirs.tolist(), abs=1e-3)


@pytest.fixture(params=["eagle3", "draft_model"])
def drafting(
    request: pytest.FixtureRequest, target_model: str, directories: dict[str, str], tmp_path: Path
) -> Iterator[VllmVerifier]:
    apart = settings(target_model, threads=1, vllm={"distributed_executor_backend": "mp", "adapters": directories})
    with proposer(head(tmp_path / "head", request.param), "", target_model, "") as chosen:
        verifier = VllmVerifier(*load_engine(apart, SAMPLER, proposer=chosen))
    yield verifier
    verifier._engine.shut_down()


async def test_a_target_that_drafts_by_itself_has_adapters(
    drafting: VllmVerifier, alone: dict[str, TargetAlone]
) -> None:
    async with cluster([drafting]) as deployment:
        await check(deployment.client, alone)
        await deployment.settled()


def test_an_adapter_of_another_model_is_refused(load, target_model: str, tmp_path: Path) -> None:
    """vLLM would leave out what it does not find, and give the text of the model."""
    other = "model.layers.99.self_attn.o_proj"
    tensors = {f"{other}.lora_{part}.weight": torch.ones(shape) for part, shape in (("A", (4, 320)), ("B", (320, 4)))}
    folder = save(tmp_path / "other", 4, ("o_proj",), tensors)
    with pytest.raises(ValueError, match=rf"adapter other is of another model: \['{other}'\]"):
        load(settings(target_model, vllm={"adapters": {"other": folder}}), SAMPLER)


def test_the_model_digest_depends_on_the_adapters(directories: dict[str, str]) -> None:
    chosen = [{}, {"tall": directories["tall"]}, {"tall": directories["wide"]}, directories]
    parts = {loading._of_settings(VllmSettings(adapters=named), torch.device("cpu"))[1] for named in chosen}
    assert len(parts) == len(chosen)
