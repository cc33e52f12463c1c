"""Static memory in which everything that a pass does not write anew is nonsense."""

from __future__ import annotations

import pytest

from specdec.backends.cuda.memory import PassMemory
from specdec.backends.cuda.plan import Inputs, Plan

POISON = 0x7FABCDEF
"""No token, no slot, no row; as a float64 about 1e306."""


def poison_static_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before each description is loaded."""
    load = PassMemory.load

    def poisoned(memory: PassMemory, plan: Plan, inputs: Inputs | None = None) -> None:
        memory.there.fill_(POISON)
        load(memory, plan, inputs)

    monkeypatch.setattr(PassMemory, "load", poisoned)
