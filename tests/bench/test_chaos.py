"""One row of the fault table in its short form. ``specdec chaos`` runs all of it at length."""

from __future__ import annotations

import pytest

from bench.chaos.__main__ import ROWS, description, run


@pytest.mark.slow
async def test_nothing_is_lost_repeated_or_changed():
    trial = await run(1, seed=1, short=True)
    assert not trial.failures


def test_every_row_says_what_it_does():
    assert set(range(1, 30)) - {25} <= ROWS.keys()
    for row in ROWS.values():
        assert description(row).endswith(".")
