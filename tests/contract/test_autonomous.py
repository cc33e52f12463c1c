"""Autonomous decoding, and rounds that name a base that the target has left behind."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from specdec.core.errors import ContextExceeded, OutOfStep
from target_service.language_model import LmVerifier
from testing.raw import BLOCK, GREEDY, TOKEN, round_, target, target_open, tree
from tests.models.table_runner import TableRunner


async def decode_to(stream: Any, runner: TableRunner, allowance: int, **fields: Any) -> list[Any]:
    """Open sequence 1, allow ``allowance`` plain tokens after round 1; all verdicts of round 1."""
    await stream.ask(target_open(1, **GREEDY, **fields))
    await stream.send(rounds=[round_(1, 1, 4, num_autonomous=allowance)])
    return [await stream.answer(1) for _ in range(allowance + 1)]


async def test_autonomous_decoding_gives_the_plain_text_up_to_its_allowance() -> None:
    runner = TableRunner()
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        verdicts = await decode_to(stream, runner, 6)
        assert [(v.round, v.base, list(v.accepted)) for v in verdicts] == [(1, 4 + i, []) for i in range(7)]
        assert [v.next_token for v in verdicts] == runner.greedy_text([1, 2, 3], 8)[1:]
        # Allowance spent: the service rests, and the next round finds it there.
        passes = (await service.load()).passes
        assert ((await stream.ask(round_(1, 2, 11))).base, (await service.load()).passes) == (11, passes + 1)


async def test_autonomous_decoding_stops_at_a_stop_token() -> None:
    runner = TableRunner(seed=3)
    text = runner.greedy_text([1, 2, 3], 60)
    stop = next(token for token in text[2:] if token not in text[:2])
    at = text.index(stop)
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await stream.ask(target_open(1, stop_token_ids=[stop], **GREEDY))
        await stream.send(rounds=[round_(1, 1, 4, num_autonomous=50)])
        got = [(await stream.answer(1)).next_token for _ in range(at)]
        assert got == text[1 : at + 1]
        await stream.half_close()
        assert await stream.status() is grpc.StatusCode.OK
        assert stream.unread(1) == 0
        assert (await service.load()).passes == at + 1


async def test_autonomous_decoding_stops_at_the_end_of_the_context_and_more_is_out_of_range() -> None:
    runner = TableRunner(context_length=12)
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await stream.ask(target_open(1, **GREEDY))
        await stream.send(rounds=[round_(1, 1, 4, num_autonomous=1000)])
        verdicts = [await stream.answer(1) for _ in range(8)]
        assert verdicts[-1].base == 11  # its token is the 12th
        await stream.send(rounds=[round_(1, 2, 12)])
        error = await stream.error(1)
        assert isinstance(error, ContextExceeded)
        assert "12" in str(error)


async def test_a_round_with_an_older_base_is_walked_along_and_the_rest_is_verified() -> None:
    runner = TableRunner()
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await decode_to(stream, runner, 3)
        text = runner.greedy_text([1, 2, 3], 20)  # base 8 now, text[:5] is committed
        # Hangs from base 5: three tokens are known by now, two are new and right, the last is wrong.
        wrong = (text[7] + 1) % 8
        verdict = await stream.ask(round_(1, 2, 5, tree([*text[2:7], wrong])))
        assert (verdict.round, verdict.base, list(verdict.accepted)) == (2, 8, [3, 4])
        assert verdict.next_token == text[7]


async def test_a_round_with_an_older_base_that_mismatches_verifies_nothing() -> None:
    runner = TableRunner()
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await decode_to(stream, runner, 3)
        text = runner.greedy_text([1, 2, 3], 20)
        ids = [text[2], (text[3] + 1) % 8, text[4], text[5], text[6]]
        verdict = await stream.ask(round_(1, 2, 5, tree(ids)))
        assert (verdict.base, list(verdict.accepted), verdict.next_token) == (8, [], text[5])


async def test_an_older_tree_that_ends_before_the_current_base_verifies_nothing() -> None:
    runner = TableRunner()
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await decode_to(stream, runner, 3)
        text = runner.greedy_text([1, 2, 3], 20)
        for number, ids in ((2, text[2:4]), (3, text[2:5])):
            verdict = await stream.ask(round_(1, number, 5, tree(ids)))
            assert (verdict.base, list(verdict.accepted), verdict.next_token) == (6 + number, [], text[3 + number])


async def test_a_round_may_overtake_autonomous_decoding() -> None:
    """Whatever the target produced meanwhile, the text is one and the numbers add up."""
    runner = TableRunner()
    text = runner.greedy_text([1, 2, 3], 400)
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        base, committed = 4, [(await stream.ask(target_open(1, **GREEDY))).next_token]
        for number in range(1, 12):
            await stream.send(rounds=[round_(1, number, base, tree(text[base - 3 : base + 1]), num_autonomous=20)])
            while True:
                verdict = await stream.answer(1)
                assert verdict.base == base
                assert verdict.round in (number - 1, number)
                accepted = text[base - 3 : base - 3 + len(verdict.accepted)]
                committed += [*accepted, verdict.next_token]
                base += len(verdict.accepted) + 1
                if verdict.round == number:
                    break
        assert committed == text[: len(committed)]


@pytest.mark.parametrize("method", [TOKEN, BLOCK])
async def test_with_distributions_a_run_on_is_ended_by_an_empty_round(method: int) -> None:
    async with target(LmVerifier(TableRunner())) as service:
        stream = service.stream()
        await stream.ask(target_open(1, method=method))
        await stream.send(rounds=[round_(1, 1, 4, num_autonomous=3)])
        for _ in range(4):
            verdict = await stream.answer(1)
        await stream.send(rounds=[round_(1, 2, 5)])  # empty: an older base is no harm
        verdict = await stream.answer(1)
        assert (verdict.round, verdict.base) == (2, 8)
        assert (await stream.ask(round_(1, 3, 9, tree([1, 2])))).base == 9
        await stream.send(rounds=[round_(1, 4, 4, tree([1, 2]))])
        error = await stream.error(1)
        assert isinstance(error, OutOfStep)
        assert "base" in str(error)
