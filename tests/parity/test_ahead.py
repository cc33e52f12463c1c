"""Law 1 while the draft grows ahead of the verdict and beside its chain: the text is the target's own."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest

from draft_service.drafter import Drafter
from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.client import Client, Sample
from target_service.language_model import LmVerifier
from testing.misbehaving import Misbehaving
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.cluster import cluster
from tests.models.table_runner import TableRunner

SAMPLINGS: list[dict[str, Any]] = [
    dict(temperature=0.0),
    dict(temperature=0.8),
    dict(temperature=1.0, top_k=4, top_p=0.9),
    dict(temperature=0.7, presence_penalty=1.0, repetition_penalty=1.2),
]
VERIFIER = LmVerifier(TableRunner(seed=1, block_size=4))


def drafter(num_slots: int = 4096) -> Drafter:
    return LanguageModelDrafter(TableRunner(seed=1, blend=(2, 0.3), num_slots=num_slots, block_size=4))


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


ASKED = requests(random.Random(3), 24, SAMPLINGS)


async def samples_of(client: Client, asked: Sequence[dict[str, Any]], **fields: Any) -> list[Sample]:
    samples = await asyncio.gather(*(client.generate(**{**each, **fields}) for each in asked))
    return [sample for [sample] in samples]


async def texts(client: Client, asked: Sequence[dict[str, Any]], **fields: Any) -> list[list[int]]:
    return [list(sample.token_ids) for sample in await samples_of(client, asked, **fields)]


_alone: list[list[int]] = []


async def alone() -> list[list[int]]:
    """The texts of ASKED by the target alone."""
    if not _alone:
        async with cluster([VERIFIER]) as running:
            _alone.extend(await texts(running.client, ASKED, num_draft_tokens=0))
    return _alone


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "num_slots"),
    [
        (dict(num_ahead_tokens=4), 4096),
        (dict(num_ahead_tokens=30, num_siblings=2), 4096),
        (dict(num_ahead_tokens=60), 128),  # no memory for branches
    ],
)
async def test_the_text_is_the_same_and_many_verdicts_were_foreseen(settings: dict[str, int], num_slots: int) -> None:
    expected = await alone()
    # Slow passes leave the draft time to grow ahead.
    verifier = Misbehaving(VERIFIER, pass_s=0.005)
    async with cluster([verifier], [drafter(num_slots)], **settings) as running:
        samples = []
        for start in range(0, len(ASKED), 8):
            samples += await samples_of(running.client, ASKED[start : start + 8], num_draft_tokens=3)
        await running.settled()
    assert [list(sample.token_ids) for sample in samples] == expected
    told = [sample.finish.speculation for sample in samples]
    num_foreseen = sum(each.num_bonus_hits + sum(each.num_correction_hits_per_pos) for each in told)
    assert num_foreseen > len(ASKED) / 2


@pytest.mark.slow
async def test_with_siblings_the_text_is_the_same_and_more_is_accepted() -> None:
    expected = await alone()
    accepted_per_draft = []  # rounds without one, where a draft came too late, are a matter of time
    for num_siblings in (0, 2):
        async with cluster([VERIFIER], [drafter()], num_siblings=num_siblings) as running:
            samples = await samples_of(running.client, ASKED, num_draft_tokens=3)
            await running.settled()
        assert [list(sample.token_ids) for sample in samples] == expected
        told = [sample.finish.speculation for sample in samples]
        num_drafts = sum(each.num_drafts for each in told)
        accepted_per_draft.append(sum(each.num_accepted_tokens for each in told) / num_drafts)
    assert accepted_per_draft[1] > accepted_per_draft[0]


async def test_the_number_of_draft_tokens_may_change_in_every_round() -> None:
    table = Table(vocab_size=64)
    verifier, tables_drafter = TableVerifier(table, pass_s=0.002), TableDrafter(table)
    asked = requests(random.Random(5), 12, SAMPLINGS[:2])
    async with cluster([verifier], [tables_drafter], num_ahead_tokens=20, num_draft_tokens=None) as running:
        expected = await texts(running.client, asked, num_draft_tokens=0)
        assert await texts(running.client, asked) == expected
        await running.settled()


@pytest.mark.parametrize("method", ["TOKEN", "BLOCK"])
async def test_token_and_block_run_as_plain_chains_beside_it(method: str) -> None:
    fields = {"verification": f"VERIFICATION_METHOD_{method}", "temperature": 0.8}
    async with cluster([VERIFIER], [drafter()], num_ahead_tokens=20, num_siblings=2) as running:
        samples = await samples_of(running.client, ASKED[:6], num_draft_tokens=3, **fields)
        told = [sample.finish.speculation for sample in samples]
        assert sum(each.num_accepted_tokens for each in told) > 0
        assert sum(each.num_drafts_on_time for each in told) == 0
        await running.settled()


async def test_a_draft_that_cannot_grow_ahead_is_not_asked_to() -> None:
    table = Table(vocab_size=64)
    older = TableDrafter(table)
    older.info = table.info("table-draft")
    async with cluster([TableVerifier(table)], [older], num_ahead_tokens=20) as running:
        [sample] = await running.client.generate(token_ids={"token_ids": [1]}, max_tokens=60, num_draft_tokens=4)
        assert sample.finish.speculation.num_accepted_tokens > 10
