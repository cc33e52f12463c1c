"""One row of the fault table in its short form. ``specdec chaos`` runs all of it at length."""

from __future__ import annotations

import asyncio

import pytest

from bench.chaos.__main__ import ROWS, description, run
from bench.chaos.overload import capacity_of
from specdec.v1.generation_pb2 import FINISH_REASON_LENGTH, Chunk, Finish, GenerateResponse
from testing.trial import Trial


@pytest.mark.slow
async def test_nothing_is_lost_repeated_or_changed():
    trial = await run(1, seed=1, short=True)
    assert not trial.failures


async def test_the_capacity_is_that_of_the_answers_that_end_in_time():
    class Client:
        async def stream(self, timeout_s, **fields):
            await asyncio.sleep(0.2)
            yield GenerateResponse(chunk=Chunk(finish=Finish(reason=FINISH_REASON_LENGTH)))

    # Each of the 16 clients gets an answer after 0.2 s, and its next one after 0.4 s.
    assert await capacity_of(Trial(seed=1), Client(), seconds=0.3) == 16 / 0.3


def test_every_row_says_what_it_does():
    assert set(range(1, 30)) - {25} <= ROWS.keys()
    for row in ROWS.values():
        assert description(row).endswith(".")
