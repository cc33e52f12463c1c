"""Where the text repeats itself the target makes fewer passes than tokens without any draft; where it does not, nothing
is guessed. The text is the target's either way."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from bench.table_model import Table, TableDrafter, TableVerifier
from tests.cluster import Cluster, cluster

PROMPT = [1, 2, 3]
LENGTH = 300
PERIOD = 30


class Silent(TableDrafter):
    """Never answers, until it is released."""

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self.released = threading.Event()

    def grow(self, sequences: Any) -> Any:
        self.released.wait(60)
        return super().grow(sequences)


class Counted(TableVerifier):
    """Counts its passes."""

    num_passes = 0

    def verify(self, jobs: Any) -> Any:
        self.num_passes += 1
        return super().verify(jobs)


async def sample(running: Cluster, **fields: Any) -> Any:
    [one] = await running.client.generate(
        **{"token_ids": {"token_ids": PROMPT}, "max_tokens": LENGTH, "seed": 5} | fields
    )
    return one


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("draft", ["none", "dead", "silent"])
async def test_without_a_draft_a_text_that_repeats_itself_takes_few_passes(draft, temperature):
    table = Table(period=PERIOD)
    fields = {"temperature": temperature}
    async with cluster([TableVerifier(table)]) as running:
        alone = await sample(running, num_draft_tokens=0, **fields)
    verifier, silent = Counted(table, pass_s=0.01), Silent(table)
    drafters = {"none": [], "dead": [TableDrafter(table)], "silent": [silent]}[draft]
    async with cluster([verifier], drafters, num_draft_tokens=None) as running:
        if draft == "dead":
            await running.drafts[0].stop()
        told = await sample(running, **fields)
        assert list(told.token_ids) == list(alone.token_ids)
        counts = told.finish.speculation
        silent.released.set()
        assert verifier.num_passes < 0.5 * LENGTH
        assert counts.num_accepted_lookup_tokens > 0.5 * LENGTH
        assert counts.num_accepted_lookup_tokens == counts.num_accepted_tokens


async def test_a_text_that_does_not_repeat_itself_is_left_alone():
    table = Table()
    async with cluster([TableVerifier(table, pass_s=0.003)], num_draft_tokens=None) as running:
        counts = (await sample(running)).finish.speculation
    assert counts.num_draft_tokens <= 0.02 * LENGTH
