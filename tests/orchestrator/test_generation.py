"""What every request measures and all of them share."""

from __future__ import annotations

import asyncio

import pytest

from bench.models.table_model import Table, TableDrafter, TableVerifier
from orchestrator.sequence import Sequence
from specdec.core.errors import SpecdecError
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


class Panic(BaseException):
    """As what is written in Rust raises it: no Exception."""


async def test_what_goes_wrong_in_a_sample_ends_its_request_whatever_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object) -> None:
        raise Panic("in Rust")

    fields = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 20, "seed": 5, "num_draft_tokens": 0}
    async with cluster([TableVerifier(TABLE)]) as running:
        with monkeypatch.context() as patch:
            patch.setattr(Sequence, "extend", panic)
            with pytest.raises(SpecdecError):
                await asyncio.wait_for(running.client.generate(**fields), 20)
        assert running.orchestrator.live_sequences == 0
        await running.client.generate(**fields)
