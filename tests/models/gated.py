"""Passes of a model that wait until a test lets them go on."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

from bench.models.table_model import TableVerifier

PATIENCE_S = 30.0
"""Only a broken service takes that long."""


class Gated:
    """Before a verifier's class: its passes wait while the gate is closed."""

    def __init__(self, *arguments: Any, closes_at: int | None = None, **options: Any) -> None:
        """Of its passes, ``closes_at`` (the first is 1) closes the gate itself."""
        super().__init__(*arguments, **options)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()  # some pass found the gate closed
        self.closes_at = closes_at
        self.num_passes = 0

    def verify(self, jobs: Any) -> Any:
        self.num_passes += 1
        if self.num_passes == self.closes_at:
            self.gate.clear()
        if not self.gate.is_set():
            self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        return super().verify(jobs)  # type: ignore[misc]

    async def in_a_pass(self) -> None:
        """Returns once a pass waits."""
        assert await asyncio.to_thread(self.entered.wait, PATIENCE_S)


class GatedTable(Gated, TableVerifier):
    pass
