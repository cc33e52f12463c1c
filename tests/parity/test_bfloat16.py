"""Law: a text does not depend on drafts, neighbours, prefix reuse or cancellations, in bfloat16 as in float32.

bfloat16 has near ties everywhere: if a row's logits depended on how it is packed, some of these texts would change. On
other devices than a CPU they may, but only at a near tie.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from tests.cluster import Cluster, cluster
from tests.models.scripted import BranchingDrafter, WatchingVerifier
from tests.parity.conftest import Reference, load
from tests.parity.target_alone import COUPLED, GREEDY, SETTINGS, Case, TargetAlone

CONCURRENCY = 8
NEAR_TIE = 0.5


@pytest.fixture(scope="module")
def cases(prompts: list[list[int]]) -> list[Case]:
    """Mixed lengths; some prompts begin alike."""
    rng = random.Random(3)
    settings = [SETTINGS.index(GREEDY), SETTINGS.index(COUPLED[4])]
    return [
        Case(tuple(prompts[index % 6][: rng.choice([3, 17, 40, 200])]), index, rng.choice(settings))
        for index in range(12)
    ]


async def generate_among_others(
    deployment: Cluster, cases: Sequence[Case], nums_draft_tokens: Sequence[int], rng: random.Random
) -> tuple[dict[Case, list[int]], int]:
    """Every case with one of these Ks, while others are begun and cancelled; and how many were cancelled."""
    turns = asyncio.Semaphore(CONCURRENCY)
    runs = [(case, rng.choice(nums_draft_tokens)) for case in cases]
    rng.shuffle(runs)
    num_cancelled = 0

    async def cancel(case: Case, num_responses: int) -> None:
        async with aclosing(deployment.client.stream(**case.request, num_draft_tokens=4)) as responses:
            for _ in range(num_responses):
                await anext(responses)

    async def one(case: Case, num_draft_tokens: int) -> list[int]:
        nonlocal num_cancelled
        async with turns:
            if rng.random() < 0.5:
                await cancel(rng.choice(cases), rng.choice([1, 2, 3]))
                num_cancelled += 1
            [sample] = await case.generate(deployment.client, num_draft_tokens)
            return list(sample.token_ids)

    texts = await asyncio.gather(*(one(*run) for run in runs))
    await deployment.settled(30.0)
    return {case: text for (case, _), text in zip(runs, texts, strict=True)}, num_cancelled


@pytest.mark.slow
async def test_the_text_depends_neither_on_drafts_nor_on_other_requests(
    cases: list[Case], reference: Reference, device: str
) -> None:
    target = load("target", "bfloat16", device)
    alone = TargetAlone(reference, [], NEAR_TIE)
    async with cluster([WatchingVerifier(target)]) as deployment:
        for case in cases:
            [sample] = await case.generate(deployment.client, 0)
            alone.texts[case] = list(sample.token_ids)

    rng = random.Random(11)
    known = {(case.prompt, case.fields["temperature"]): text for case, text in alone.texts.items()}
    branching = BranchingDrafter(
        target.info, lambda spec: known[tuple(spec.token_ids[: spec.num_prompt_tokens]), spec.sampling.temperature]
    )
    chains = LanguageModelDrafter(load("draft", "bfloat16", device))
    for drafter, nums_draft_tokens in ((chains, (0, 1, 3, 5, 8)), (branching, (4, 8, 20))):
        target.pool.forget()  # what was computed for other texts, without this drafter
        verifier = WatchingVerifier(target)
        async with cluster([verifier], [drafter]) as deployment:
            texts, num_cancelled = await generate_among_others(deployment, cases, nums_draft_tokens, rng)
        print(f"{verifier}; {num_cancelled} cancelled")
        assert verifier.num_accepted > len(cases)
        assert num_cancelled > 0
        divergences = sum(alone.diverges(case, text) for case, text in texts.items())
        assert divergences == 0 or device != "cpu"
