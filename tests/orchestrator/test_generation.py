"""What every request measures and all of them share."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from orchestrator.sequence import Sequence
from specdec.core.errors import SpecdecError
from specdec.v1 import common_pb2
from target_service.language_model import LmVerifier
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.cluster import cluster
from tests.models.table_runner import TableRunner

TABLE = Table(vocab_size=64)


async def test_who_names_no_number_drafts_as_many_as_pay_by_what_all_requests_measured() -> None:
    fields = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 400, "seed": 5}
    async with cluster([TableVerifier(TABLE, pass_s=0.002)], [TableDrafter(TABLE)], num_draft_tokens=None) as running:
        [alone] = await running.client.generate(**fields, num_draft_tokens=0)
        assert alone.finish.speculation.num_drafts == 0
        [adaptive], [other] = await asyncio.gather(
            running.client.generate(**fields), running.client.generate(**{**fields, "seed": 6})
        )
    assert adaptive.token_ids == alone.token_ids != other.token_ids
    assert adaptive.finish.speculation.num_drafts + other.finish.speculation.num_drafts > 0


async def test_beside_drafts_that_grow_ahead_a_text_whose_rounds_wait_is_drafted_for() -> None:
    """Token verification always waits, also beside texts that find trees that have arrived. Several texts, because a
    busy machine may make the draft too slow for one of them."""
    verifier, drafter = LmVerifier(TableRunner(seed=1)), LanguageModelDrafter(TableRunner(seed=1))
    fields = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 60, "temperature": 1.0}
    async with cluster([verifier], [drafter], num_draft_tokens=None, num_ahead_tokens=40) as running:
        for _ in range(20):
            [sample] = await running.client.generate(**fields, verification=common_pb2.VERIFICATION_METHOD_TOKEN)
            if sample.finish.speculation.num_drafts:
                return
    raise AssertionError("no text was drafted for")


async def test_samples_begin_one_by_one_not_all_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copies the prompt, which may have a million ids."""
    turn, begun = 0, Counter[int]()

    class Noting(Sequence):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            begun[turn] += 1
            super().__init__(*arguments, **options)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    monkeypatch.setattr("orchestrator.generation.Sequence", Noting)
    async with cluster([TableVerifier(TABLE)]) as running:
        counting = asyncio.create_task(count_turns())
        await running.client.generate(token_ids={"token_ids": [1, 2, 3]}, max_tokens=2, n=16)
        counting.cancel()
    assert begun.total() == 16
    assert max(begun.values()) <= 2


async def test_a_sample_that_waits_for_the_first_ones_prompt_does_not_keep_its_memory_from_it() -> None:
    """The first sample resumes with many ids, so that the other one has taken the memory before."""
    fields = {"token_ids": {"token_ids": list(range(10))}, "max_tokens": 400, "seed": 5, "num_draft_tokens": 0, "n": 2}
    async with cluster([TableVerifier(TABLE)]) as running:
        expected = [sample.token_ids for sample in await running.client.generate(**fields)]
    resume = {0: {"token_ids": expected[0][:300]}}
    async with cluster([TableVerifier(TABLE, num_slots=500)], park_after_s=0.1) as running:
        request = running.client.generate(**fields, resume=resume, echo=True)
        assert [sample.token_ids for sample in await asyncio.wait_for(request, 30)] == expected


async def test_a_sample_that_had_ended_before_it_resumes_plans_no_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan of -1 draft tokens would break the stream of its draft."""
    fields = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 8, "seed": 5}
    async with cluster([TableVerifier(TABLE)], [TableDrafter(TABLE)]) as running:
        [sample] = await running.client.generate(**fields)
        plans: list[object] = []
        monkeypatch.setattr("orchestrator.control.controller.Fixed.plan", lambda *_: plans.append(1))
        [again] = await running.client.generate(**fields, resume={0: {"token_ids": sample.token_ids}})
    assert again.finish.reason == sample.finish.reason
    assert not plans


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
