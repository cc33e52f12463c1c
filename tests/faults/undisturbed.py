"""Requests of the tests of faults, and what becomes of them where nothing happens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.client import Client, Sample
from target_service.language_model import LmVerifier
from target_service.verifier import Job
from tests.cluster import cluster
from tests.models.table_runner import TableRunner

PATIENCE_S = 30.0
COUPLED, TOKEN, BLOCK = "VERIFICATION_METHOD_COUPLED", "VERIFICATION_METHOD_TOKEN", "VERIFICATION_METHOD_BLOCK"
LENGTH = 40
NUM_SAMPLES = 3
SAMPLINGS = [
    pytest.param(dict(temperature=0.0), id="greedy"),
    pytest.param(dict(temperature=0.8), id="coupled"),
]


class Trap(LmVerifier):
    """A target that stops before its ``at``-th pass until it is let go on, and then does ``then``."""

    def __init__(self, runner: TableRunner, at: int = 0, then: Callable[[], None] = lambda: None) -> None:
        super().__init__(runner)
        self._at = at
        self._then = then
        self._num_passes = 0
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def verify(self, jobs: Sequence[Job]) -> Any:
        self._num_passes += 1
        if self._num_passes == self._at:
            self.reached.set()
            assert self.go_on.wait(PATIENCE_S)
            self._then()
        return super().verify(jobs)

    async def sprung(self) -> None:
        assert await asyncio.to_thread(self.reached.wait, PATIENCE_S)


def fail() -> None:
    raise RuntimeError("the device is gone")


def table(**fields: Any) -> TableRunner:
    return TableRunner(**{"seed": 1, **fields})


def drafter() -> LanguageModelDrafter:
    return LanguageModelDrafter(table(blend=(2, 0.3)))


def request(**fields: Any) -> dict[str, Any]:
    return {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": LENGTH, "seed": 11, "n": NUM_SAMPLES, **fields}


async def generate(client: Client, **fields: Any) -> list[Sample]:
    """All samples; the client itself asserts that no id is lost or repeated on the way."""
    async with asyncio.timeout(PATIENCE_S):
        return await client.generate(**request(**fields))


_undisturbed: dict[tuple[tuple[str, Any], ...], list[list[int]]] = {}


async def undisturbed(**fields: Any) -> list[list[int]]:
    """The texts of the target alone. They are always the same, so it is asked once."""
    key = tuple(sorted(fields.items()))
    if key not in _undisturbed:
        async with cluster([LmVerifier(table())]) as alone:
            samples = await generate(alone.client, num_draft_tokens=0, **fields)
        _undisturbed[key] = [sample.token_ids for sample in samples]
    return _undisturbed[key]


def assert_same(samples: list[Sample], expected: list[list[int]]) -> None:
    assert [sample.token_ids for sample in samples] == expected
    for sample in samples:
        assert len(sample.origins) == len(sample.token_ids) == LENGTH
        assert sample.finish.usage.completion_tokens == LENGTH


def replays(samples: list[Sample]) -> list[int]:
    return [sample.finish.speculation.num_replays for sample in samples]
