"""Law 1 with a draft that grows ahead behind a line that fails: seeded schedules of delays, drops, freezes and replays.

Greedy and coupled texts of every schedule are the target's own. When a fault strikes is counted in chunks, so a
schedule is the same on every machine; what it hits is not.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from bench.chaos.fault_proxy import Direction, FaultProxy
from bench.models.table_model import TableDrafter, TableVerifier
from draft_service.drafter import Drafter, DraftSequence
from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.server import create_server as create_draft_server
from orchestrator.api.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec.client import Client, Sample
from specdec.core.errors import PassFailed
from specdec.core.sequence import SequenceSpec
from specdec.core.settings import EngineSettings
from specdec.server.model_server import ModelServer
from target_service.engine import TargetEngine
from target_service.language_model import LmVerifier
from target_service.server import create_server as create_target_server
from target_service.verifier import Verifier
from tests.cluster import connected
from tests.models.table_reader import TABLE, oracle
from tests.models.table_runner import TableRunner

pytestmark = pytest.mark.slow

LINES = 6
"""Orchestrators side by side, each with a line of its own to the one draft. They share the target."""

FAULTS = ("delay", "jitter", "drop", "truncate", "freeze", "thaw", "refuse", "replay")
Oracle = Callable[[Client, dict[str, Any]], Awaitable[list[int]]]


class Whims:
    """Over any drafter: counts sequences, and gives one up where it is told, so that it is opened again."""

    to_give_up = num_opened = num_given_up = 0

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.info = drafter.info

    def open(self, spec: SequenceSpec) -> Any:
        self.num_opened += 1
        return self._drafter.open(spec)

    def grow(self, sequences: Sequence[DraftSequence]) -> Any:
        grown = list(self._drafter.grow(sequences))
        if self.to_give_up and grown:
            self.to_give_up -= 1
            self.num_given_up += 1
            grown[0] = PassFailed("planted")
        return grown

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)


@dataclass
class Line:
    """An orchestrator with a proxy on the way to its draft."""

    client: Client
    orchestrator: OrchestratorServer
    proxy: FaultProxy
    whims: Whims

    def strike(self, fault: str, chance: random.Random) -> None:
        some = chance.choice([(), (Direction.UP,), (Direction.DOWN,)])
        match fault:
            case "delay":
                self.proxy.set(*some, latency_s=chance.uniform(0.0, 0.01))
            case "jitter":
                self.proxy.set(*some, jitter_s=chance.uniform(0.0, 0.005))
            case "drop":
                self.proxy.reset()
            case "truncate":
                self.proxy.set(chance.choice(list(Direction)), truncate_after=chance.randrange(400))
            case "freeze":
                self.proxy.set(*some, hold=True)
            case "thaw":
                self.proxy.set(hold=False)
            case "refuse":
                self.proxy.refuse = True
                self.proxy.reset()
            case "replay":
                self.whims.to_give_up += 1

    async def heal(self) -> None:
        self.proxy.set(latency_s=0.0, jitter_s=0.0, hold=False, truncate_after=None)
        self.proxy.refuse = False
        await connected(self.orchestrator, 30.0)


@dataclass
class Lines:
    lines: list[Line]
    draft: ModelServer
    whims: Whims


@asynccontextmanager
async def lines(verifier: Verifier, drafter: Drafter) -> AsyncIterator[Lines]:
    whims = Whims(drafter)
    async with AsyncExitStack() as stack:
        target = create_target_server(verifier, EngineSettings())
        draft = create_draft_server(whims, EngineSettings())
        for server in (target, draft):
            await server.start()
            stack.push_async_callback(server.stop)
        found = []
        for number in range(LINES):
            proxy = await stack.enter_async_context(FaultProxy(draft.port, seed=number))
            orchestrator = OrchestratorServer(
                OrchestratorSettings(
                    target=[f"127.0.0.1:{target.port}"],
                    draft=[f"127.0.0.1:{proxy.port}"],
                    num_ahead_tokens=(4, 12, 40)[number % 3],
                )
            )
            await orchestrator.start()
            stack.push_async_callback(orchestrator.stop)
            await connected(orchestrator)
            client = await stack.enter_async_context(Client(f"127.0.0.1:{orchestrator.port}"))
            found.append(Line(client, orchestrator, proxy, whims))
        yield Lines(found, draft, whims)


def request(chance: random.Random, temperature: float, vocab_size: int) -> dict[str, Any]:
    return {
        "token_ids": {"token_ids": [chance.randrange(vocab_size) for _ in range(chance.randint(1, 12))]},
        "max_tokens": chance.randint(12, 28),
        "temperature": temperature,
        "seed": chance.getrandbits(64),
        "n": 1,
        "num_draft_tokens": chance.choice([None, 1, 2, 3, 4, 6]),
        "stop_token_ids": [],
    }


async def endure(line: Line, seed: int, vocab_size: int, expected: Oracle, struck: Counter[str]) -> list[Sample]:
    """One schedule: a greedy and a coupled request, and faults after so many of their chunks."""
    chance = random.Random(seed)
    asked = [request(chance, temperature, vocab_size) for temperature in (0.0, 0.8)]
    due = sorted((chance.randint(1, 12), chance.choice(FAULTS)) for _ in range(chance.randint(1, 5)))
    num_chunks = 0

    async def read(fields: dict[str, Any]) -> Sample:
        nonlocal num_chunks
        sample = Sample()
        async for response in line.client.stream(**fields):
            if response.HasField("chunk"):
                sample.add(response.chunk)
                num_chunks += 1
                while due and due[0][0] <= num_chunks:
                    _, fault = due.pop(0)
                    line.strike(fault, chance)
                    struck[fault] += 1
        return sample

    samples = await asyncio.gather(*(read(fields) for fields in asked))
    await line.heal()
    for fields, sample in zip(asked, samples, strict=True):
        assert sample.token_ids == await expected(line.client, fields), f"schedule {seed}: {fields}"
    return list(samples)


async def table_text(_: Client, fields: dict[str, Any]) -> list[int]:
    ids, _ = oracle(fields, 0)
    return list(ids)


async def text_of_the_target_alone(client: Client, fields: dict[str, Any]) -> list[int]:
    [alone] = await client.generate(**{**fields, "num_draft_tokens": 0})
    return list(alone.token_ids)


def tables() -> tuple[Verifier, Drafter]:
    return TableVerifier(TABLE, pass_s=0.001), TableDrafter(TABLE)


def language_models() -> tuple[Verifier, Drafter]:
    draft = TableRunner(seed=1, blend=(2, 0.3), block_size=4)
    return LmVerifier(TableRunner(seed=1, block_size=4)), LanguageModelDrafter(draft)


@pytest.mark.parametrize(
    ("models", "vocab_size", "expected", "schedules", "num_early"),
    [
        (tables, TABLE.vocab_size, table_text, range(165), 40),
        (language_models, 8, text_of_the_target_alone, range(40), 0),  # too few to be sure of both kinds
    ],
    ids=["tables", "language models"],
)
async def test_the_text_is_the_targets_whatever_happens_on_the_way_to_the_draft(
    models: Callable[[], tuple[Verifier, Drafter]],
    vocab_size: int,
    expected: Oracle,
    schedules: range,
    num_early: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    struck: Counter[str] = Counter()
    told = []
    early = {"stands": 0, "dropped": 0}
    go_on = TargetEngine._go_on

    def counting(engine: TargetEngine, sequence: Any, ends: bool) -> int:
        was_early = sequence.early is not None
        dropped = go_on(engine, sequence, ends)
        if was_early:
            early["dropped" if dropped else "stands"] += 1
        return dropped

    monkeypatch.setattr(TargetEngine, "_go_on", counting)
    async with lines(*models()) as running:
        seeds = iter(schedules)

        async def one_after_the_other(line: Line) -> None:
            for seed in seeds:  # shared: each takes the next
                samples = await endure(line, seed, vocab_size, expected, struck)
                told.extend(sample.finish.speculation for sample in samples)

        await asyncio.gather(*map(one_after_the_other, running.lines))
        async with asyncio.timeout(10.0):
            while running.draft.load.live_sequences or running.draft.load.kv_slots_used:
                await asyncio.sleep(0.01)
    assert len(told) == 2 * len(schedules)
    assert {*FAULTS} <= struck.keys(), "no kind of fault was left out"
    foreseen = sum(each.num_bonuses_foreseen + sum(each.num_corrections_foreseen_per_pos) for each in told)
    assert foreseen > len(schedules) / 2, "it did grow ahead"
    assert any(each.num_drafts < each.num_rounds - 1 for each in told), "and at times there was no draft"
    assert early["stands"] + early["dropped"] > len(schedules) / 4, "rounds were sent early"
    assert early["stands"] >= num_early, "of which some stood"
    assert early["dropped"] >= num_early, "and of others nothing was left"
    assert running.whims.num_given_up
    assert running.whims.num_opened > len(told), "sequences were opened again"
