"""The fault table in its short form: the rows that take a few seconds. ``specdec chaos`` runs all of it at length."""

from __future__ import annotations

import pytest

from bench.chaos.__main__ import ROWS, done, run

QUICK = (1, 3, 4, 5, 19)


@pytest.mark.slow
@pytest.mark.parametrize("number", QUICK, ids=lambda number: f"row_{number:02}")
async def test_nothing_is_lost_repeated_or_changed(number):
    outcome = await run(number, seed=1, short=True)
    # How fast it was is for a quiet machine to say.
    assert not outcome.failures


def test_every_row_says_what_it_does():
    assert set(range(1, 30)) <= ROWS.keys()
    for row in ROWS.values():
        assert done(row).endswith(".")
