"""Input that breaks the contract, and what a service must answer: shared by the tests of the three services."""

from __future__ import annotations

import math
import re
from typing import Any

from specdec.core.errors import InvalidArgument, OutOfStep
from testing.out_of_step import refusals
from testing.raw import Raw
from tests.models.table_runner import TableRunner

NAN, INF = math.nan, math.inf
CONTEXT = 64


def runner(**fields: Any) -> TableRunner:
    return TableRunner(**{"context_length": CONTEXT, **fields})


async def assert_violation(stream: Raw, sequence: int, field: str) -> None:
    error = await stream.error(sequence)
    assert isinstance(error, InvalidArgument), (sequence, error)
    assert [name for name, _ in error.violations] == [field], error


async def assert_out_of_step(stream: Raw, first: int) -> None:
    """Whatever is out of step is refused, by the name of what was expected."""
    async for name, error, names in refusals(stream, first):
        assert isinstance(error, OutOfStep), (name, error)
        assert re.search(rf"\b{names}\b", str(error)), (name, error)
