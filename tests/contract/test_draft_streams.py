"""Advances and growths, frame by frame, against the draft service alone."""

from __future__ import annotations

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.v1 import draft_pb2
from testing.misbehaving import Misbehaving
from testing.raw import BLOCK, GREEDY, TOKEN, advance, draft, draft_open
from tests.cluster import orders_wait
from tests.models.table_runner import TableRunner


async def test_a_newer_advance_supersedes_an_older_one_and_their_news_is_merged() -> None:
    runner = TableRunner()
    drafter = Misbehaving(LanguageModelDrafter(runner), closes_at=1)
    text = runner.greedy_text([1, 2, 3], 20)
    async with draft(drafter) as service:
        stream = service.stream()
        await stream.send(opens=[draft_open(1, max_nodes=8, **GREEDY)])
        await drafter.in_a_pass()
        await stream.send(advances=[advance(1, 1, 5, text[:2], max_nodes=8)])
        await stream.send(advances=[advance(1, 2, 6, text[2:3], max_nodes=4)])
        await orders_wait(service.server, 2)
        drafter.gate.set()
        answers = [await stream.answer(1) for _ in range(3)]
        assert [(a.advance, a.end) for a in answers] == [
            (0, draft_pb2.GROWTH_END_SUPERSEDED),
            (1, draft_pb2.GROWTH_END_SUPERSEDED),
            (2, draft_pb2.GROWTH_END_BUDGET),
        ]
        assert answers[2].base == 6
        assert list(answers[2].tree.token_ids) == text[3:7]


@pytest.mark.parametrize("method", [TOKEN, BLOCK])
async def test_a_chain_with_distributions_is_drawn_afresh_at_every_advance(method: int) -> None:
    async with draft(LanguageModelDrafter(TableRunner())) as service:
        stream = service.stream()
        await stream.ask(draft_open(1, method=method))
        chain = await stream.ask(advance(1, 1, 4, [5], max_nodes=4))
        assert (len(chain.tree.token_ids), len(chain.tree.draft_probs)) == (4, 4)
        again = await stream.ask(advance(1, 2, 5, chain.tree.token_ids[:1], max_nodes=4))
        assert (again.base, len(again.tree.token_ids)) == (5, 4)


async def test_a_coupled_tree_keeps_what_is_below_the_committed_tokens() -> None:
    runner = TableRunner()
    async with draft(LanguageModelDrafter(runner)) as service:
        stream = service.stream()
        grown = list((await stream.ask(draft_open(1, max_nodes=6, seed=3))).tree.token_ids)
        passes = runner.num_passes
        assert list((await stream.ask(advance(1, 1, 5, grown[:2], max_nodes=0))).tree.token_ids) == grown[2:]
        assert runner.num_passes == passes


async def test_a_draft_stops_at_its_own_context() -> None:
    async with draft(LanguageModelDrafter(TableRunner(context_length=8))) as service:
        stream = service.stream()
        growth = await stream.ask(draft_open(1, max_nodes=30))
        assert (len(growth.tree.token_ids), growth.end) == (6, draft_pb2.GROWTH_END_CONTEXT)  # 8 fed, 1 more known
        assert (await stream.ask(draft_open(2, token_ids=[1] * 20, max_nodes=3))).end == draft_pb2.GROWTH_END_CONTEXT


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_where_noise_is_keyed_only_ids_come_and_in_one_frame_per_pass(temperature: float) -> None:
    """Law 8: eight sequences whose advances come in one frame; what they grow ahead is told pass by pass."""
    runner, numbers = TableRunner(), range(1, 9)
    async with draft(LanguageModelDrafter(runner)) as service:
        stream = service.stream()
        await stream.send(opens=[draft_open(s, token_ids=[s - 1, 2, 3], temperature=temperature) for s in numbers])
        for s in numbers:
            await stream.answer(s)
        num_passes = runner.num_passes + runner.num_further_passes
        heard = len(stream.frames)
        fields = dict(max_nodes=2, max_depth=8, max_ahead=12)
        await stream.send(advances=[advance(s, 1, 4, [5], **fields) for s in numbers])
        for s in numbers:
            while (await stream.answer(s)).end == draft_pb2.GROWTH_END_UNSPECIFIED:
                pass
        frames = [frame for frame in stream.frames[heard:] if frame.growths]
        assert len(frames) <= runner.num_passes + runner.num_further_passes - num_passes
        assert all({growth.sequence for growth in frame.growths} == {*numbers} for frame in frames)
        growths = [growth for frame in frames for growth in frame.growths]
        assert all(sum(len(g.tree.token_ids) for g in growths if g.sequence == s) >= 2 + 12 for s in numbers)
        assert not any(growth.tree.draft_probs for growth in growths)
