"""Law: a text does not depend on drafts, neighbours, prefix reuse or cancellations, in bfloat16 as in float32.

bfloat16 has near ties everywhere: if a row's logits depended on how it is packed, some of these texts would change.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import NamedTuple

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.core.settings import ModelServiceSettings
from specdec.runner.loading import load_runner
from specdec.runner.model_runner import ModelRunner
from tests.cluster import Cluster, cluster
from tests.models.scripted import BranchingDrafter, WatchingVerifier
from tests.parity.conftest import DEMO

CONCURRENCY = 8


class Case(NamedTuple):
    prompt: tuple[int, ...]
    num_tokens: int
    temperature: float
    seed: int


@pytest.fixture(scope="module")
def cases(prompts: list[list[int]]) -> list[Case]:
    """Mixed lengths; some prompts begin alike."""
    rng = random.Random(3)
    chosen = []
    for index in range(12):
        prompt = prompts[index % 6][: rng.choice([3, 17, 40, 200])]
        chosen.append(Case(tuple(prompt), rng.choice([5, 20, 32]), rng.choice([0.0, 0.8]), index))
    return chosen


def load(role: str) -> ModelRunner:
    return load_runner(ModelServiceSettings(model=str(DEMO / role), dtype="bfloat16", kv_slots=8192, threads=1))


async def generate(deployment: Cluster, case: Case, num_draft_tokens: int) -> list[int]:
    [sample] = await deployment.client.generate(
        token_ids={"token_ids": case.prompt},
        max_tokens=case.num_tokens,
        temperature=case.temperature,
        seed=case.seed,
        num_draft_tokens=num_draft_tokens,
    )
    return list(sample.token_ids)


async def generate_among_others(
    deployment: Cluster, cases: Sequence[Case], nums_draft_tokens: Sequence[int], rng: random.Random
) -> tuple[dict[Case, list[int]], int]:
    """Every case with one of these Ks, so many at a time, while others are begun and cancelled; how many were."""
    turns = asyncio.Semaphore(CONCURRENCY)
    runs = [(case, rng.choice(nums_draft_tokens)) for case in cases]
    rng.shuffle(runs)
    num_cancelled = 0

    async def cancelled(case: Case, after_s: float) -> bool:
        try:
            async with asyncio.timeout(after_s):
                await generate(deployment, case, 4)
        except TimeoutError:
            return True
        return False

    async def one(run: tuple[Case, int]) -> list[int]:
        nonlocal num_cancelled
        async with turns:
            if rng.random() < 0.5:
                num_cancelled += await cancelled(rng.choice(cases), rng.choice([0.001, 0.02, 0.1]))
            return await generate(deployment, *run)

    texts = await asyncio.gather(*(one(run) for run in runs))
    await deployment.settled(30.0)
    return {case: text for (case, _), text in zip(runs, texts, strict=True)}, num_cancelled


async def test_the_text_is_the_targets_whatever_is_drafted_and_whoever_is_there(cases: list[Case]) -> None:
    target = load("target")
    alone: dict[Case, list[int]] = {}
    async with cluster([WatchingVerifier(target)]) as deployment:
        for case in cases:
            alone[case] = await generate(deployment, case, 0)

    rng = random.Random(11)
    known = {(case.prompt, case.temperature): text for case, text in alone.items()}
    branching = BranchingDrafter(
        target.info, lambda spec: known[spec.token_ids[: spec.num_prompt_tokens], spec.sampling.temperature]
    )
    chains = LanguageModelDrafter(load("draft"))
    for drafter, nums_draft_tokens in ((chains, (0, 1, 3, 5, 8)), (branching, (4, 8, 20))):
        target.pool.forget()  # what was computed for other texts, without this drafter
        verifier = WatchingVerifier(target)
        async with cluster([verifier], [drafter]) as deployment:
            texts, num_cancelled = await generate_among_others(deployment, cases, nums_draft_tokens, rng)
        print(f"{verifier}; {num_cancelled} cancelled")
        assert verifier.num_accepted > len(cases)
        assert num_cancelled > 0
        assert texts == alone
