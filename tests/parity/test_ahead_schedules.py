"""Law 1 with a draft that grows ahead behind a line that fails: seeded schedules of delays, drops, freezes and replays.

Greedy and coupled texts of every schedule are the target's own. When a fault strikes is counted in chunks, so a
schedule is the same on every machine; what it hits is not.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from draft_service.drafter import Drafter
from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.server import create_server as create_draft_server
from orchestrator.api.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec.client import Client, Sample
from specdec.core.errors import PassFailed
from specdec.core.rounds import Round, Verdict
from specdec.core.settings import EngineSettings
from specdec.server.model_server import ModelServer
from specdec.server.step_loop import Key
from target_service.engine import TargetEngine
from target_service.language_model import LmVerifier
from target_service.server import create_server as create_target_server
from target_service.verifier import Verifier
from testing.fault_proxy import Direction, FaultProxy
from testing.misbehaving import Misbehaving
from testing.patience import eventually
from testing.table_model import TableDrafter, TableVerifier
from tests.cluster import connected
from tests.models.table_reader import TABLE, oracle
from tests.models.table_runner import TableRunner

pytestmark = pytest.mark.slow

LINES = 6
"""Orchestrators side by side, each with a line of its own to the one draft. They share the target."""

FAULTS = ("delay", "jitter", "drop", "truncate", "freeze", "thaw", "refuse", "replay")
Oracle = Callable[[Client, dict[str, Any]], Awaitable[list[int]]]


@dataclass
class Line:
    """An orchestrator with a proxy on the way to its draft."""

    client: Client
    orchestrator: OrchestratorServer
    proxy: FaultProxy
    drafter: Misbehaving

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
                self.drafter.script((), PassFailed("planted"))

    async def heal(self) -> None:
        self.proxy.set(latency_s=0.0, jitter_s=0.0, hold=False, truncate_after=None)
        self.proxy.refuse = False
        await connected(self.orchestrator, 30.0)


@dataclass
class Lines:
    lines: list[Line]
    draft: ModelServer
    drafter: Misbehaving


@asynccontextmanager
async def lines(verifier: Verifier, drafter: Drafter) -> AsyncIterator[Lines]:
    faulty = Misbehaving(drafter)
    async with AsyncExitStack() as stack:
        target = create_target_server(verifier, EngineSettings())
        draft = create_draft_server(faulty, EngineSettings())
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
            found.append(Line(client, orchestrator, proxy, faulty))
        yield Lines(found, draft, faulty)


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
    target = Misbehaving(LmVerifier(TableRunner(seed=1, block_size=4)), pass_s=0.003)
    return target, LanguageModelDrafter(draft)


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Rounds that targets of this process were sent before the verdict on the one before: "sent" and "dropped"."""
    counts: Counter[str] = Counter()
    answered: dict[tuple[TargetEngine, Key], int] = {}
    submit, step = TargetEngine.submit, TargetEngine.step

    def submitting(engine: TargetEngine, key: Key, round_: Round, arrived: float | None = None) -> None:
        counts["sent"] += round_.number > answered.get((engine, key), -1) + 1
        submit(engine, key, round_, arrived)

    def stepping(engine: TargetEngine, poll: Any) -> Any:
        results = step(engine, poll)
        for key, result in results:
            if isinstance(result, Verdict):
                answered[engine, key] = result.round
                counts["dropped"] += result.dropped_round > 0
        return results

    monkeypatch.setattr(TargetEngine, "submit", submitting)
    monkeypatch.setattr(TargetEngine, "step", stepping)
    return counts


@pytest.mark.parametrize(
    ("models", "vocab_size", "expected", "schedules", "num_early"),
    [
        (tables, TABLE.vocab_size, table_text, range(80), 10),
        (language_models, 8, text_of_the_target_alone, range(24), 0),  # too few to be sure of both kinds
    ],
    ids=["tables", "language models"],
)
async def test_the_text_is_the_targets_whatever_happens_on_the_way_to_the_draft(
    models: Callable[[], tuple[Verifier, Drafter]],
    vocab_size: int,
    expected: Oracle,
    schedules: range,
    num_early: int,
    early: Counter[str],
) -> None:
    struck: Counter[str] = Counter()
    told = []
    async with lines(*models()) as running:
        seeds = iter(schedules)

        async def one_after_the_other(line: Line) -> None:
            for seed in seeds:  # shared: each takes the next
                samples = await endure(line, seed, vocab_size, expected, struck)
                told.extend(sample.finish.speculation for sample in samples)

        await asyncio.gather(*map(one_after_the_other, running.lines))
        await eventually(lambda: not (running.draft.load.live_sequences or running.draft.load.kv_slots_used))
    assert len(told) == 2 * len(schedules)
    assert {*FAULTS} <= struck.keys(), "no kind of fault was left out"
    foreseen = sum(each.num_bonus_hits + sum(each.num_correction_hits_per_pos) for each in told)
    assert foreseen > len(schedules) / 2, "the draft did grow ahead"
    assert any(each.num_drafts < each.num_rounds - 1 for each in told), "and at times there was no draft"
    assert early["sent"] > len(schedules) / 4, "rounds were sent early"
    assert early["dropped"] >= num_early, "some of them were dropped"
    assert early["sent"] - early["dropped"] >= num_early, "and others stood"
    assert running.drafter.num_opened > len(told), "sequences were opened again"
