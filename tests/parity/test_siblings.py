"""Law 1 with runners-up beside the chain: the text is the target's own, and more of what is verified is accepted."""

from __future__ import annotations

import random

import pytest

from tests.cluster import cluster
from tests.parity.test_ahead import SAMPLINGS, language_models, requests, samples_of, texts


@pytest.mark.slow
@pytest.mark.parametrize("num_ahead_tokens", [0, 30])
async def test_the_text_is_the_same_and_more_is_accepted(num_ahead_tokens: int) -> None:
    asked = requests(random.Random(3), 32, SAMPLINGS)
    accepted_per_draft = []  # rounds without one, where a draft came too late, are a matter of time
    alone: list[list[int]] = []
    for num_siblings in (0, 2):
        verifier, drafter = language_models()
        settings = {"num_ahead_tokens": num_ahead_tokens, "num_siblings": num_siblings}
        async with cluster([verifier], [drafter], **settings) as running:
            alone = alone or await texts(running.client, asked, num_draft_tokens=0)
            samples = await samples_of(running.client, asked, num_draft_tokens=3)
            assert [list(sample.token_ids) for sample in samples] == alone
            found = [sample.finish.speculation for sample in samples]
            accepted_per_draft.append(
                sum(each.num_accepted_tokens for each in found) / sum(each.num_drafts for each in found)
            )
            await running.settled()
    if not num_ahead_tokens:  # what comes ahead has no siblings, and how much that is depends on the time it had
        assert accepted_per_draft[1] > 1.1 * accepted_per_draft[0]


@pytest.mark.parametrize("verification", ["TOKEN", "BLOCK"])
async def test_methods_with_distributions_do_without(verification: str) -> None:
    verifier, drafter = language_models()
    asked = requests(random.Random(4), 8, [{"temperature": 1.0}])
    async with cluster([verifier], [drafter], num_siblings=2) as running:
        method = f"VERIFICATION_METHOD_{verification}"
        samples = await samples_of(running.client, asked, num_draft_tokens=3, verification=method)
        assert sum(sample.finish.speculation.num_draft_tokens for sample in samples) > 0
        await running.settled()
