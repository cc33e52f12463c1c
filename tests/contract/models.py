"""What the tests of streams put behind the services: a model that waits and fails on demand, and what it says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

from target_service.engine import Job
from target_service.lm_verifier import LmVerifier
from tests.contract.raw import (
    PATIENCE_S,
)
from tests.table_model import TableRunner

GREEDY = dict(temperature=0.0)


class GatedVerifier(LmVerifier):
    """Passes wait while the gate is closed, and fail while told to."""

    def __init__(self, runner: TableRunner) -> None:
        super().__init__(runner)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.raises = False

    def verify(self, jobs: Sequence[Job]) -> Any:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        if self.raises:
            self._runner.forward([])
            for job in jobs:
                job.memory.cache.take(3)  # a pass that fails has taken slots already
            raise RuntimeError("the device is gone")
        return super().verify(jobs)

    async def in_a_pass(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, PATIENCE_S)


def greedy_text(runner: TableRunner, prefix: Sequence[int], length: int) -> list[int]:
    """What the model itself says."""
    ids = list(prefix)
    for _ in range(length):
        ids.append(int(runner.logits_after(ids).argmax()))
    return ids[len(prefix) :]
