"""Law: a target's self-drafts change when tokens come, never which. Their rounds need no trip between two passes."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from specdec.core.errors import InvalidArgument
from specdec.core.rounds import SELF_DRAFT, Round, TargetOpen, Verdict
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import TokenTree
from specdec.server.step_loop import Key
from specdec.transport.wire import write_spec
from specdec.v1 import target_pb2
from target_service.codec import TargetCodec
from target_service.engine import TargetEngine
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.cluster import cluster

TABLE = Table(vocab_size=400, acceptance=0.8)
PROMPT = {"token_ids": [1, 2, 3]}


async def sample_of(running: Any, **fields: Any) -> Any:
    [sample] = await running.client.generate(token_ids=PROMPT, seed=5, **fields)
    return sample


async def logprobs_of(running: Any, **fields: Any) -> list[float]:
    told: list[float] = []
    async for response in running.client.stream(token_ids=PROMPT, seed=5, logprobs=2, **fields):
        told += response.chunk.logprobs.logprobs
    return told


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("with_draft", [False, True])
async def test_the_text_and_its_logprobs_are_the_targets(temperature: float, with_draft: bool):
    asked = {"max_tokens": 200, "temperature": temperature}
    async with cluster([TableVerifier(TABLE)]) as running:
        alone, logprobs = await sample_of(running, **asked), await logprobs_of(running, **asked)
    drafters = [TableDrafter(TABLE)] if with_draft else []
    async with cluster([TableVerifier(TABLE, pass_s=0.001, self_drafts=True)], drafters) as running:
        for number in (None, 0, 1, 4, 16):
            fixed = {} if number is None else {"num_draft_tokens": number}
            found = await sample_of(running, **asked, **fixed)
            assert found.token_ids == alone.token_ids
            assert await logprobs_of(running, **asked, **fixed) == logprobs
            told = found.finish.speculation
            assert (told.num_self_draft_tokens > 0) == (number != 0)
            assert told.num_self_draft_tokens <= told.num_draft_tokens
            if number:
                assert told.num_accepted_self_draft_tokens / told.num_self_draft_tokens > 0.2
                assert told.num_rounds < 200


@pytest.mark.slow
async def test_a_target_without_a_head_takes_over():
    async with cluster([TableVerifier(TABLE)]) as running:
        alone = await sample_of(running, max_tokens=300)
    verifiers = [TableVerifier(TABLE, pass_s=0.004, self_drafts=True), TableVerifier(TABLE, pass_s=0.004)]
    async with cluster(verifiers) as running:
        requests = [asyncio.create_task(sample_of(running, max_tokens=300, num_draft_tokens=3)) for _ in range(4)]
        await asyncio.sleep(0.2)
        await running.targets[0].stop(0)
        assert [(await request).token_ids for request in requests] == [alone.token_ids] * 4


async def test_many_tokens_come_with_one_question(monkeypatch: pytest.MonkeyPatch):
    asked: list[Round] = []
    submit = TargetEngine.submit

    def counting(engine: TargetEngine, key: Any, round_: Round, arrived: float | None = None) -> None:
        asked.append(round_)
        submit(engine, key, round_, arrived)

    monkeypatch.setattr(TargetEngine, "submit", counting)
    async with cluster([TableVerifier(TABLE, pass_s=0.002, self_drafts=True)]) as running:
        found = await sample_of(running, max_tokens=400, num_draft_tokens=4)
    assert len(found.token_ids) == 400
    assert len(asked) < found.finish.speculation.num_rounds / 2


@pytest.mark.parametrize("spoilt", ["too many nodes", "no path"])
async def test_a_target_that_verifies_what_cannot_be_its_tree_is_left(spoilt: str):
    class Lying(TableVerifier):
        def verify(self, jobs: Any) -> Any:
            decisions, timings = super().verify(jobs)
            return [self._spoilt(decision) for decision in decisions], timings

        def _spoilt(self, decision: Any) -> Any:
            if not decision.self_draft:
                return decision
            if spoilt == "too many nodes":
                return dataclasses.replace(decision, self_draft=TokenTree.chain(range(9)))
            return dataclasses.replace(decision, accepted=(1, 0))

    async with cluster([TableVerifier(TABLE)]) as running:
        alone = await sample_of(running, max_tokens=60)
    async with cluster([Lying(TABLE, self_drafts=True), TableVerifier(TABLE, pass_s=0.001)]) as running:
        for _ in range(3):
            assert (await sample_of(running, max_tokens=60, num_draft_tokens=4)).token_ids == alone.token_ids


async def test_clients_are_told_of_a_head():
    async with cluster([TableVerifier(TABLE, self_drafts=True)]) as running:
        assert (await running.client.server_info()).target.self_draft == "table"


@pytest.mark.parametrize(("method", "head"), [(Method.TOKEN, True), (Method.COUPLED, False)])
def test_an_open_that_asks_for_what_is_not_possible_is_refused(method: Method, head: bool):
    codec = TargetCodec(dataclasses.replace(TABLE.info("t"), capabilities=(SELF_DRAFT,) if head else ()))
    spec = write_spec(SequenceSpec([1, 2], 2, SamplingParams(), 1, method), "", "")
    codec.read_open(target_pb2.TargetOpen(sequence=1, spec=spec))
    with pytest.raises(InvalidArgument, match="max_self_draft_nodes"):
        codec.read_open(target_pb2.TargetOpen(sequence=1, spec=spec, max_self_draft_nodes=4))


def engine_and_key() -> tuple[TargetEngine, Key]:
    engine = TargetEngine(TableVerifier(TABLE, self_drafts=True))
    key = Key(1, 1)
    spec = SequenceSpec([1, 2, 3], 3, SamplingParams(), 5, Method.COUPLED)
    engine.open(key, TargetOpen(spec, max_self_draft_nodes=4))
    return engine, key


def test_a_round_may_not_ask_for_more_than_its_open_said():
    engine, key = engine_and_key()
    engine.step()
    with pytest.raises(InvalidArgument, match="self_draft_nodes"):
        engine.submit(key, Round(1, 4, self_draft_nodes=5))


def test_a_sent_tree_comes_before_an_own_one():
    engine, key = engine_and_key()
    engine.step()
    engine.submit(key, Round(1, 4, TokenTree.chain([7]), num_autonomous=8, self_draft_nodes=4))
    [(_, first)] = engine.step()
    assert isinstance(first, Verdict)
    assert not first.self_draft
    [(_, second)] = engine.step()
    assert isinstance(second, Verdict)
    assert len(second.self_draft) == 4
    committed = len(second.accepted) + 1
    assert second.num_autonomous_left == 8 - committed


def test_autonomous_tokens_end_at_the_allowed_number_or_less_than_a_tree_later():
    engine, key = engine_and_key()
    engine.step()
    engine.submit(key, Round(1, 4, num_autonomous=10, self_draft_nodes=4))
    committed = 0
    while not engine.idle:
        for _, verdict in engine.step():
            assert isinstance(verdict, Verdict)
            committed += len(verdict.accepted) + 1
    assert 11 <= committed < 11 + 5 + 5
