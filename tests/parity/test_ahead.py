"""Law 1 while the draft grows ahead of the verdict: the text is the target's own, and many verdicts were foreseen."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest

from bench.models.table_model import Table, TableDrafter, TableVerifier
from draft_service.drafter import Drafter
from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.client import Client, Sample
from specdec.core.errors import SpecdecError
from specdec.core.rounds import Timings
from target_service.language_model import LmVerifier
from target_service.verifier import Decision, Job, Verifier
from tests.cluster import Cluster, cluster
from tests.models.table_runner import TableRunner

SAMPLINGS: list[dict[str, Any]] = [
    dict(temperature=0.0),
    dict(temperature=0.8),
    dict(temperature=1.0, top_k=4, top_p=0.9),
    dict(temperature=0.7, presence_penalty=1.0, repetition_penalty=1.2),
]


class Unhurried(LmVerifier):
    """Leaves the draft time to grow ahead."""

    def verify(self, jobs: Sequence[Job]) -> tuple[list[Decision | SpecdecError | None], Timings]:
        time.sleep(0.01)
        return super().verify(jobs)


def language_models(slots: int = 4096) -> tuple[Verifier, Drafter]:
    draft = TableRunner(seed=1, blend=(2, 0.3), num_slots=slots, block_size=4)
    return Unhurried(TableRunner(seed=1, block_size=4)), LanguageModelDrafter(draft)


def tables() -> tuple[Verifier, Drafter]:
    table = Table(vocab_size=64)
    return TableVerifier(table, pass_s=0.002), TableDrafter(table)


def requests(random_: random.Random, count: int, samplings: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "token_ids": {"token_ids": [random_.randrange(8) for _ in range(random_.randrange(1, 30))]},
            "max_tokens": random_.randrange(1, 80),
            "seed": random_.getrandbits(64),
            "stop_token_ids": random_.sample(range(8), random_.choice([0, 0, 1])),
            **random_.choice(samplings),
        }
        for _ in range(count)
    ]


async def samples_of(client: Client, asked: Sequence[dict[str, Any]], **fields: Any) -> list[Sample]:
    samples = await asyncio.gather(*(client.generate(**{**each, **fields}) for each in asked))
    return [sample for [sample] in samples]


async def texts(client: Client, asked: Sequence[dict[str, Any]], **fields: Any) -> list[list[int]]:
    return [list(sample.token_ids) for sample in await samples_of(client, asked, **fields)]


def waits(running: Cluster) -> float:
    """The share of rounds that waited for the draft."""
    return running.orchestrator._servicer._generator._costs.waits


@pytest.mark.slow
@pytest.mark.parametrize("num_ahead_tokens", [4, 30])
async def test_the_text_is_the_same_and_many_verdicts_were_foreseen(num_ahead_tokens: int) -> None:
    verifier, drafter = language_models()
    asked = requests(random.Random(num_ahead_tokens), 40, SAMPLINGS)
    async with cluster([verifier], [drafter], num_ahead_tokens=num_ahead_tokens) as running:
        alone = await texts(running.client, asked, num_draft_tokens=0)
        for start in range(0, len(asked), 8):
            group = slice(start, start + 8)
            assert await texts(running.client, asked[group], num_draft_tokens=3) == alone[group]
        assert waits(running) < 1.0
        await running.settled()


@pytest.mark.slow
async def test_the_text_is_the_same_where_the_draft_has_no_memory_for_branches() -> None:
    verifier, drafter = language_models(slots=128)
    asked = requests(random.Random(4), 12, SAMPLINGS[:2])
    async with cluster([verifier], [drafter], num_ahead_tokens=60) as running:
        alone = await texts(running.client, asked, num_draft_tokens=0)
        assert await texts(running.client, asked[:6], num_draft_tokens=4) == alone[:6]
        assert await texts(running.client, asked[6:], num_draft_tokens=4) == alone[6:]
        await running.settled()


async def test_the_number_of_draft_tokens_may_change_in_every_round() -> None:
    verifier, drafter = tables()
    asked = requests(random.Random(5), 12, SAMPLINGS[:2])
    async with cluster([verifier], [drafter], num_ahead_tokens=20, num_draft_tokens=None) as running:
        alone = await texts(running.client, asked, num_draft_tokens=0)
        assert await texts(running.client, asked) == alone
        await running.settled()


@pytest.mark.parametrize("verification", [2, 3])
async def test_token_and_block_run_as_plain_chains_beside_it(verification: int) -> None:
    verifier, drafter = language_models()
    asked = requests(random.Random(6), 6, [dict(temperature=0.8, verification=verification)])
    async with cluster([verifier], [drafter], num_ahead_tokens=20) as running:
        samples = await samples_of(running.client, asked, num_draft_tokens=3)
        assert all(sample.token_ids for sample in samples)
        assert sum(sample.finish.speculation.num_accepted_tokens for sample in samples) > 0
        assert sum(sample.finish.speculation.num_drafts_on_time for sample in samples) == 0


async def test_a_draft_that_cannot_is_not_asked_to() -> None:
    table = Table(vocab_size=64)
    older = TableDrafter(table)
    older.info = table.info("table-draft")
    async with cluster([TableVerifier(table)], [older], num_ahead_tokens=20) as running:
        [sample] = await running.client.generate(token_ids={"token_ids": [1]}, max_tokens=60, num_draft_tokens=4)
        assert sample.finish.speculation.num_accepted_tokens > 10
