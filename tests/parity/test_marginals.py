"""Law: over seeds, coupled output follows the target's distribution, draft or no draft."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from target_service.language_model import LmVerifier
from tests.cluster import cluster
from tests.models.table_runner import TableRunner
from tests.parity.chi_square import p_value
from tests.parity.reference import Filtered

pytestmark = pytest.mark.slow

NUM_TOKENS = 6
NUM_REQUESTS, SAMPLES = 30, 64
PROMPT = [1, 2]


def pair_laws(runner: TableRunner, setting: dict[str, Any]) -> list[np.ndarray]:
    """The law of (output t, output t + 1) for every t, from the table: it looks two tokens back."""
    vocab_size = runner.info.vocab_size
    step = np.zeros((vocab_size,) * 3)
    for first in range(vocab_size):
        for second in range(vocab_size):
            step[first, second] = Filtered(runner.logits_after([first, second]).numpy(), **setting).distribution
    pair = np.zeros((vocab_size, vocab_size))
    pair[PROMPT[0], PROMPT[1]] = 1.0
    laws = []
    for _ in range(NUM_TOKENS + 1):
        pair = np.einsum("ab,abc->bc", pair, step)
        laws.append(pair)
    return laws[1:]


@pytest.mark.parametrize(
    ("vocab_size", "num_draft_tokens", "setting"),
    [
        (8, 3, {"temperature": 1.0}),
        (6, 4, {"temperature": 0.8, "top_p": 0.85}),
        (7, 2, {"temperature": 1.3, "top_k": 4}),
    ],
    ids=["plain", "top-p", "top-k"],
)
async def test_marginals_and_neighbouring_pairs_follow_the_target(
    vocab_size: int, num_draft_tokens: int, setting: dict[str, Any]
) -> None:
    target = TableRunner(vocab_size, seed=11, num_slots=1 << 16)
    draft = TableRunner(vocab_size, seed=11, blend=(12, 0.4), num_slots=1 << 16)
    async with cluster([LmVerifier(target)], [LanguageModelDrafter(draft)]) as deployment:
        turns = asyncio.Semaphore(4)

        async def request(seed: int) -> list[Any]:
            async with turns:
                return await deployment.client.generate(
                    token_ids={"token_ids": PROMPT},
                    max_tokens=NUM_TOKENS,
                    n=SAMPLES,
                    seed=seed,
                    num_draft_tokens=num_draft_tokens,
                    **setting,
                )

        samples = [sample for group in await asyncio.gather(*map(request, range(NUM_REQUESTS))) for sample in group]
        await deployment.settled(30.0)
    ids = np.array([sample.token_ids for sample in samples])  # [samples, tokens]
    accepted = sum(sample.finish.speculation.num_accepted_tokens for sample in samples)
    assert ids.shape == (NUM_REQUESTS * SAMPLES, NUM_TOKENS)
    assert accepted > len(samples)

    values = {}
    for position, law in enumerate(pair_laws(target, setting)):
        marginal = np.bincount(ids[:, position], minlength=vocab_size)
        values[f"{position}"] = p_value(marginal, len(ids) * law.sum(1))
        if position + 1 < NUM_TOKENS:
            pairs = np.bincount(ids[:, position] * vocab_size + ids[:, position + 1], minlength=vocab_size**2)
            values[f"{position},{position + 1}"] = p_value(pairs, len(ids) * law.ravel())
    print(f"{len(ids)} texts, {accepted} drafted tokens accepted; p:", {k: round(v, 4) for k, v in values.items()})
    assert min(values.values()) > 1e-4
