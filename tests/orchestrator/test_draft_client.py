"""How long a draft is waited for."""

import asyncio

import pytest

from orchestrator import draft_client
from orchestrator.draft_client import DraftClient
from orchestrator.link import Lane
from orchestrator.sequence import Sequence
from specdec.rounds import Budget, Growth, GrowthEnd
from specdec.sequence import Method, SamplingParams
from specdec.tree import TokenTree


class FakeLink:
    def __init__(self) -> None:
        self.sent: list[object] = []

    def send(self, opens=(), entries=()) -> None:
        self.sent.extend([*opens, *entries])

    def leave(self, lane) -> None: ...


class FakeReplica:
    def __init__(self) -> None:
        self.link = FakeLink()
        self.lanes: list[Lane] = []

    def lane(self) -> Lane:
        self.lanes.append(Lane(self.link, len(self.lanes)))
        return self.lanes[-1]

    def observe(self, latency_s: float) -> None: ...


class FakePool:
    def __init__(self) -> None:
        self.replica = FakeReplica()

    def pick(self) -> FakeReplica:
        return self.replica


def asked(temperature: float, method: Method) -> tuple[DraftClient, Sequence, FakeReplica]:
    pool = FakePool()
    sequence = Sequence([1, 2], 9, SamplingParams(temperature), 0, method)
    client = DraftClient(pool)
    assert client.advance(sequence, Budget(4, 4))
    return client, sequence, pool.replica


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_late_draft_is_done_without_where_that_cannot_bias(monkeypatch, temperature):
    monkeypatch.setattr(draft_client, "_PATIENCE_S", 0.01)
    client, sequence, replica = asked(temperature, Method.COUPLED)
    assert await client.growth(sequence) is None
    assert not client.advance(sequence, Budget(4, 4)), "it is not asked again at once"
    assert len(replica.lanes) == 1


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
async def test_a_late_chain_is_never_dropped_for_its_lateness(monkeypatch, method):
    monkeypatch.setattr(draft_client, "_PATIENCE_S", 0.01)
    client, sequence, replica = asked(1.0, method)
    waiting = asyncio.create_task(client.growth(sequence))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    late = Growth(0, 2, (), TokenTree.chain([5]), GrowthEnd.BUDGET)
    replica.lanes[0].put(late)
    assert await waiting is late
