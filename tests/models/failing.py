"""What the tests of streams put behind the services: a model that waits and fails on demand, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from target_service.language_model import LmVerifier
from target_service.verifier import Job
from tests.models.gated import Gated
from tests.models.table_runner import TableRunner

GREEDY = dict(temperature=0.0)


class Failing(LmVerifier):
    """Passes fail while told to."""

    raises = False

    def verify(self, jobs: Sequence[Job]) -> Any:
        if self.raises:
            self._runner.forward([])
            for job in jobs:
                job.memory.cache.take(3)  # a pass that fails has taken slots already
            raise RuntimeError("the device is gone")
        return super().verify(jobs)


class GatedVerifier(Gated, Failing):
    """Does so behind a gate."""


def greedy_text(runner: TableRunner, prefix: Sequence[int], length: int) -> list[int]:
    """What the model itself says."""
    ids = list(prefix)
    for _ in range(length):
        ids.append(int(runner.logits_after(ids).argmax()))
    return ids[len(prefix) :]
