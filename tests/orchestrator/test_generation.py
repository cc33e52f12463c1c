"""What every request measures and all of them share."""

from __future__ import annotations

import asyncio

from bench.table_model import Table, TableDrafter, TableVerifier
from tests.cluster import cluster

TABLE = Table(vocab_size=64)


async def test_who_names_no_number_drafts_as_many_as_pay_by_what_all_requests_measured() -> None:
    fields = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 120, "seed": 5}
    async with cluster([TableVerifier(TABLE, pass_s=0.002)], [TableDrafter(TABLE)], num_draft_tokens=None) as running:
        costs = running.orchestrator._servicer._generator._costs
        [alone] = await running.client.generate(**fields, num_draft_tokens=0)
        assert not costs.known, "of the draft nothing was seen yet"
        [adaptive], [other] = await asyncio.gather(
            running.client.generate(**fields), running.client.generate(**{**fields, "seed": 6})
        )
        assert adaptive.token_ids == alone.token_ids != other.token_ids
        assert costs.known
        assert adaptive.finish.speculation.num_drafts > 0
