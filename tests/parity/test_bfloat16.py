"""Law: a text does not depend on drafts, neighbours, prefix reuse or cancellations, in bfloat16 as in float32.

bfloat16 has near ties everywhere: if a row's logits depended on how it is packed, some of these texts would change.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import grpc
import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.loading import load_runner
from specdec.settings import ModelServiceSettings
from tests.cluster import Cluster, cluster
from tests.parity.conftest import DEMO
from tests.parity.drafters import BranchingDrafter, WatchingVerifier

PATIENT: dict[str, Any] = {"watchdog_s": 60.0}  # a busy machine is no lost replica
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
    for index in range(24):
        prompt = prompts[index % 12][: rng.choice([3, 17, 40, 200])]
        chosen.append(Case(tuple(prompt), rng.choice([5, 20, 32]), rng.choice([0.0, 0.8]), index))
    return chosen


@pytest.fixture(scope="module")
def settings() -> dict[str, ModelServiceSettings]:
    return {
        role: ModelServiceSettings(model=str(DEMO / role), dtype="bfloat16", kv_slots=8192, threads=1)
        for role in ("target", "draft")
    }


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
    deployment: Cluster, cases: Sequence[Case], rng: random.Random
) -> dict[tuple[Case, int], list[int]]:
    """Every case twice with a random K, so many at a time, while others are begun and cancelled."""
    turns = asyncio.Semaphore(CONCURRENCY)
    runs = [(case, rng.choice([0, 1, 3, 5, 8])) for case in cases for _ in range(2)]
    rng.shuffle(runs)

    async def cancelled(case: Case, after_s: float) -> None:
        with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(after_s):
                await generate(deployment, case, 4)

    async def one(run: tuple[Case, int]) -> list[int]:
        async with turns:
            if rng.random() < 0.3:
                await cancelled(rng.choice(cases), rng.choice([0.001, 0.02, 0.1]))
            return await generate(deployment, *run)

    texts = await asyncio.gather(*(one(run) for run in runs))
    await deployment.settled(30.0)
    return dict(zip(runs, texts, strict=True))


async def test_the_text_is_the_targets_whatever_is_drafted_and_whoever_is_there(
    cases: list[Case], settings: dict[str, ModelServiceSettings]
) -> None:
    alone: dict[Case, list[int]] = {}
    async with cluster([WatchingVerifier(load_runner(settings["target"]))], **PATIENT) as deployment:
        for case in cases:
            alone[case] = await generate(deployment, case, 0)

    rng = random.Random(11)
    drafter = LanguageModelDrafter(load_runner(settings["draft"]))
    known = {(case.prompt, case.temperature): text for case, text in alone.items()}
    verifier = WatchingVerifier(load_runner(settings["target"]))
    branching = BranchingDrafter(
        verifier.info, lambda spec: known[spec.token_ids[: spec.num_prompt_tokens], spec.sampling.temperature]
    )
    different = num_texts = 0
    for drafters in ([drafter], [branching]):
        verifier = WatchingVerifier(load_runner(settings["target"]))
        async with cluster([verifier], drafters, **PATIENT) as deployment:
            texts = await generate_among_others(deployment, cases, rng)
        print(verifier)
        assert verifier.num_accepted > len(cases)
        num_texts += len(texts)
        different += sum(text != alone[case] for (case, _), text in texts.items())
    print(f"{different} of {num_texts} texts differ")
    assert not different
