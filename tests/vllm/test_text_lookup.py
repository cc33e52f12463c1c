"""Law: a target on vLLM that looks up in its texts gives the same ones, and repeated text takes fewer passes."""

from __future__ import annotations

from typing import Any

import pytest

from target_service.self_draft.text_lookup import TextLookup
from target_service.vllm_verifier import SAMPLER, VllmVerifier
from tests.cluster import cluster
from tests.parity.conftest import Reference
from tests.parity.target_alone import SETTINGS, Case, TargetAlone
from tests.vllm.conftest import settings
from tests.vllm.test_texts import check

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


async def test_the_text_is_that_of_plain_transformers(
    load: Any, target_model: str, reference: Reference, prompts: list[list[int]], near_tie: float
) -> None:
    """While others are cancelled, with none to 8 tokens of each text, with penalties and filters."""
    verifier = VllmVerifier(*load(settings(target_model), SAMPLER), lookup=TextLookup())
    repeated = [tuple(prompt[:12] * 2) for prompt in prompts]
    cases = [Case(repeated[number % len(repeated)], number, number) for number in range(len(SETTINGS))]
    async with cluster([verifier]) as deployment:
        await check(deployment, TargetAlone(reference, cases, near_tie), lambda rng: rng.randrange(9))
        fields: dict[str, Any] = {"token_ids": {"token_ids": prompts[0][:8] * 8}, "max_tokens": 80, "temperature": 0.0}
        alone, looked_up = [
            (await deployment.client.generate(**fields, num_draft_tokens=number))[0] for number in (0, 8)
        ]
        await deployment.settled()
    counts = looked_up.finish.speculation
    assert looked_up.token_ids == alone.token_ids
    assert counts.num_rounds < len(alone.token_ids)
    assert counts.num_accepted_self_draft_tokens == counts.num_accepted_tokens > 0
    assert verifier._engine.num_sequences == 0
