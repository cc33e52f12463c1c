"""Requests of the tests of faults, and their texts where nothing happens."""

from __future__ import annotations

import asyncio
from typing import Any

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.client import Client, Sample
from target_service.language_model import LmVerifier
from testing.patience import PATIENCE_S
from tests.cluster import cluster
from tests.models.table_runner import TableRunner

COUPLED, TOKEN, BLOCK = "VERIFICATION_METHOD_COUPLED", "VERIFICATION_METHOD_TOKEN", "VERIFICATION_METHOD_BLOCK"
LENGTH = 40
NUM_SAMPLES = 3


def table(**fields: Any) -> TableRunner:
    return TableRunner(**{"seed": 1, **fields})


def verifier(**fields: Any) -> LmVerifier:
    return LmVerifier(table(**fields))


def drafter(**fields: Any) -> LanguageModelDrafter:
    return LanguageModelDrafter(table(blend=(2, 0.3), **fields))


async def generate(client: Client, **fields: Any) -> list[Sample]:
    """All samples; the client itself asserts that no id is lost or repeated on the way."""
    request = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": LENGTH, "seed": 11, "n": NUM_SAMPLES}
    async with asyncio.timeout(PATIENCE_S):
        return await client.generate(**{**request, "temperature": 0.8, **fields})


_undisturbed: dict[tuple[tuple[str, Any], ...], list[list[int]]] = {}


async def undisturbed(**fields: Any) -> list[list[int]]:
    """The texts of the target alone. They are always the same, so it is asked once."""
    key = tuple(sorted(fields.items()))
    if key not in _undisturbed:
        async with cluster([verifier()]) as alone:
            samples = await generate(alone.client, num_draft_tokens=0, **fields)
        _undisturbed[key] = [sample.token_ids for sample in samples]
    return _undisturbed[key]


def assert_same(samples: list[Sample], expected: list[list[int]]) -> None:
    assert [sample.token_ids for sample in samples] == expected
    for sample in samples:
        assert len(sample.origins) == len(sample.token_ids) == sample.finish.usage.completion_tokens


def replays(samples: list[Sample]) -> list[int]:
    return [sample.finish.speculation.num_replays for sample in samples]
