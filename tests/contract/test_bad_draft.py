"""Every row of the status table, provoked over gRPC at the draft service; it serves as before afterwards."""

from __future__ import annotations

from typing import Any

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.core.errors import Overloaded
from testing.raw import (
    BLOCK,
    TOKEN,
    advance,
    draft,
    draft_open,
    tree,
)
from tests.contract.bad import assert_out_of_step, assert_violation, runner


async def test_a_malformed_advance_is_refused_by_field_and_disturbs_no_other() -> None:
    bad: list[tuple[str, dict[str, Any]]] = [
        ("token_ids", dict(base=4, token_ids=[8])),
        ("in_flight", dict(base=3, in_flight=tree([1, 1], [-1, -1]))),
        ("in_flight", dict(base=3, in_flight=tree([9]))),
        ("in_flight", dict(base=3, in_flight=tree([1] * 600), max_ahead=1)),
        ("in_flight", dict(base=3, in_flight=tree([1] * 257), max_ahead=1)),
    ]
    async with draft(LanguageModelDrafter(runner())) as service:
        stream = service.stream()
        await stream.ask(draft_open(1))
        for sequence, (field, fields) in enumerate(bad, 2):
            await stream.ask(draft_open(sequence))
            await stream.send(advances=[advance(sequence, 1, **fields)])
            await assert_violation(stream, sequence, field)
        for sequence, method in ((20, TOKEN), (21, BLOCK)):
            await stream.send(opens=[draft_open(sequence, 3, method=method)])
            await assert_violation(stream, sequence, "budget.max_nodes")
        for sequence, method in ((22, TOKEN), (23, BLOCK)):
            await stream.send(opens=[draft_open(sequence, max_ahead=1, method=method)])
            await assert_violation(stream, sequence, "budget.max_ahead")
        assert len((await stream.ask(advance(1, 1, 4, [5], max_nodes=3))).tree.token_ids) == 3
        await stream.send(closes=[1])
        await service.nothing_left(open_streams=1)


async def test_a_draft_without_kv_slots_refuses_the_sequence_and_its_neighbours_stay() -> None:
    async with draft(LanguageModelDrafter(runner(num_slots=20))) as service:
        stream = service.stream()
        await stream.ask(draft_open(1, 2, token_ids=[1] * 10))
        await stream.send(opens=[draft_open(2, 2, token_ids=[2] * 12)])
        error = await stream.error(2)
        assert isinstance(error, Overloaded)
        assert error.retry_after_s > 0
        assert len((await stream.ask(advance(1, 1, 11, [3]))).tree.token_ids) == 2
        await stream.send(closes=[1])
        await service.nothing_left(open_streams=1)


async def test_an_advance_out_of_step_is_aborted_naming_what_was_expected() -> None:
    async with draft(LanguageModelDrafter(runner())) as service:
        stream = service.stream()
        await stream.ask(draft_open(100))
        await assert_out_of_step(stream, 101)
        assert (await stream.ask(advance(100, 1, 4, [1]))).advance == 1
        await stream.send(closes=[100, 107])  # 107 was opened beside the unknown one
        await service.nothing_left(open_streams=1)
