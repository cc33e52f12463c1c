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

VOCAB, NUM_TOKENS, NUM_DRAFT_TOKENS = 7, 6, 3
NUM_REQUESTS, SAMPLES = 5, 64  # of each setting
PROMPT = [1, 2]
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "top-p": {"temperature": 0.8, "top_p": 0.85},
    "top-k": {"temperature": 1.3, "top_k": 4},
}


def pair_laws(runner: TableRunner, setting: dict[str, Any]) -> list[np.ndarray]:
    """The law of (output t, output t + 1) for every t, from the table: it looks two tokens back."""
    step = np.zeros((VOCAB,) * 3)
    for first in range(VOCAB):
        for second in range(VOCAB):
            step[first, second] = Filtered(runner.logits_after([first, second]).numpy(), **setting).distribution
    pair = np.zeros((VOCAB, VOCAB))
    pair[PROMPT[0], PROMPT[1]] = 1.0
    laws = []
    for _ in range(NUM_TOKENS + 1):
        pair = np.einsum("ab,abc->bc", pair, step)
        laws.append(pair)
    return laws[1:]


def p_values(ids: np.ndarray, laws: list[np.ndarray]) -> list[float]:
    """Of all tokens and of all neighbouring pairs of texts [samples, tokens]."""
    values = []
    for position, law in enumerate(laws):
        values.append(p_value(np.bincount(ids[:, position], minlength=VOCAB), len(ids) * law.sum(1)))
        if position + 1 < NUM_TOKENS:
            pairs = np.bincount(ids[:, position] * VOCAB + ids[:, position + 1], minlength=VOCAB**2)
            values.append(p_value(pairs, len(ids) * law.ravel()))
    return values


async def test_marginals_and_neighbouring_pairs_follow_the_target() -> None:
    target = TableRunner(VOCAB, seed=11, num_slots=1 << 16)
    draft = TableRunner(VOCAB, seed=11, blend=(12, 0.4), num_slots=1 << 16)
    texts: dict[str, list[Any]] = {name: [] for name in SETTINGS}
    async with cluster([LmVerifier(target)], [LanguageModelDrafter(draft)]) as deployment:
        turns = asyncio.Semaphore(4)

        async def request(name: str, seed: int) -> None:
            async with turns:
                texts[name] += await deployment.client.generate(
                    token_ids={"token_ids": PROMPT},
                    max_tokens=NUM_TOKENS,
                    n=SAMPLES,
                    seed=seed,
                    num_draft_tokens=NUM_DRAFT_TOKENS,
                    **SETTINGS[name],
                )

        await asyncio.gather(*(request(name, seed) for seed in range(NUM_REQUESTS) for name in SETTINGS))
        await deployment.settled(30.0)
    for name, samples in texts.items():
        assert sum(sample.finish.speculation.num_accepted_tokens for sample in samples) > len(samples)
        ids = np.array([sample.token_ids for sample in samples])
        assert ids.shape == (NUM_REQUESTS * SAMPLES, NUM_TOKENS)
        values = p_values(ids, pair_laws(target, SETTINGS[name]))
        print(f"{name}: {len(ids)} texts; p: {[round(value, 4) for value in values]}")
        assert min(values) > 1e-4
        assert min(p_values(ids, pair_laws(draft, SETTINGS[name]))) < 1e-9, "the draft's law would be found"
