"""Tenants whose requests have different salts never find each other's prompts in a cache, in no service."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.kvcache.block_pool import Move, SequenceCache
from target_service.language_model import LmVerifier
from tests.cluster import cluster
from tests.models.table_runner import TableRunner

PROMPT = [1, 2, 3, 4, 5, 6, 7] * 6


class CountingCache(SequenceCache):
    def __init__(self, runner: CountingRunner, salt: bytes) -> None:
        super().__init__(runner.pool, salt)
        self._runner = runner

    def attach(self, ids: Sequence[int], *most_blocks: int) -> list[Move]:
        before = len(self)
        moves = super().attach(ids, *most_blocks)
        self._runner.num_reused += len(self) - before
        return moves


class CountingRunner(TableRunner):
    num_reused = 0  # positions that were found instead of computed

    def new_cache(self, salt: bytes = b"") -> SequenceCache:
        return CountingCache(self, salt)


@pytest.mark.parametrize("salts", [("", "a"), ("a", ""), ("a", "b")])
async def test_prompts_are_found_again_by_the_same_salt_alone(salts: tuple[str, str]) -> None:
    mine, others = salts
    target, draft = CountingRunner(seed=1), CountingRunner(seed=1, blend=(2, 0.3))
    async with cluster([LmVerifier(target)], [LanguageModelDrafter(draft)]) as running:

        async def reused(salt: str) -> list[bool]:
            """By one more request: something that the target had, or the draft."""
            before = [runner.num_reused for runner in (target, draft)]
            await running.client.generate(token_ids={"token_ids": PROMPT}, max_tokens=20, seed=1, cache_salt=salt)
            await running.settled()
            return [runner.num_reused > was for runner, was in zip((target, draft), before, strict=True)]

        assert await reused(mine) == [False, False]
        assert await reused(others) == [False, False]
        assert await reused(mine) == [True, True]
        assert await reused(others) == [True, True]
