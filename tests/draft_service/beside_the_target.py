"""Questions asked with a draft and without: their texts must be equal, also while others are cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from typing import Any

LENGTH = 20
"""Tokens of an answer."""


def _nothing(number: int) -> dict[str, Any]:
    return {}


async def equal_texts(
    cluster: Any, prompts: Sequence[str], cancelled: float, more: Callable[[int], dict[str, Any]] = _nothing
) -> tuple[int, int]:
    """Ask a cluster all prompts at once, every second one at temperature 1, and a share of them also to be cancelled.
    ``more``: further fields of each. Returns how many tokens were proposed, and how many accepted."""
    rng = random.Random(3)
    # Drawn here, where the order is always the same.
    drawn = [(rng.random() < cancelled, rng.randint(1, 6)) for _ in prompts]

    async def one(number: int, prompt: str) -> tuple[int, int]:
        is_cancelled, num_draft_tokens = drawn[number]
        asked = {"text": prompt, "seed": number, "temperature": float(number % 2), "max_tokens": LENGTH, **more(number)}
        if is_cancelled:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(cluster.client.generate(**asked, num_draft_tokens=4), 0.05)
        [sample] = await cluster.client.generate(**asked, num_draft_tokens=num_draft_tokens)
        [alone] = await cluster.client.generate(**asked, num_draft_tokens=0)
        assert sample.token_ids == alone.token_ids
        stats = sample.finish.speculation
        return stats.num_draft_tokens, stats.num_accepted_tokens

    texts = await asyncio.gather(*(one(*pair) for pair in enumerate(prompts)))
    proposed, accepted = map(sum, zip(*texts, strict=True))
    return proposed, accepted
