"""What an answer repeats of an earlier one of the same owner takes fewer rounds, and its text is the target's own."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import random
from pathlib import Path
from typing import Any

import pytest

from orchestrator.control import controller
from orchestrator.control.draft_length import DraftLength
from specdec.client import Client
from specdec.core.rounds import CACHE_SALT
from testing.table_model import Table, TableVerifier
from tests.cluster import Cluster, cluster

LENGTH = 120


@pytest.fixture(autouse=True)
def _every_proposal_is_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever passes take on this machine."""
    monkeypatch.setattr(DraftLength, "best_lookup", lambda policy, chances, to_come: (len(chances), 1e9))
    monkeypatch.setattr(controller._Trust, "holds", lambda trust, now: True)


async def sample(client: Client, first: int = 1, **fields: Any) -> Any:
    prompt = {"token_ids": {"token_ids": [first, 2, 3]}}
    [one] = await client.generate(**prompt | {"max_tokens": LENGTH, "temperature": 0.0, "seed": 5} | fields)
    return one


def salted() -> TableVerifier:
    verifier = TableVerifier(Table())
    verifier.info = dataclasses.replace(verifier.info, capabilities=(*verifier.info.capabilities, CACHE_SALT))
    return verifier


async def num_accepted(client: Client, **fields: Any) -> int:
    return (await sample(client, **fields)).finish.speculation.num_accepted_lookup_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_same_request_again_takes_at_most_half_of_the_rounds(temperature):
    async def rounds(running: Cluster) -> list[int]:
        await sample(running.client, 9)  # of which times are learnt
        told = [await sample(running.client, temperature=temperature) for _ in range(2)]
        assert told[0].token_ids == told[1].token_ids
        return [each.finish.speculation.num_rounds for each in told]

    async with cluster([salted()], num_draft_tokens=None, lookup_history=1 << 16) as running:
        first, second = await rounds(running)
        assert second <= first / 2
    async with cluster([salted()], num_draft_tokens=None) as running:
        first, second = await rounds(running)
        assert second > first / 2, "it is off unless asked for"


async def test_of_another_salt_nothing_is_proposed():
    async with cluster([salted()], num_draft_tokens=None, lookup_history=1 << 16) as running:
        await sample(running.client, 9)
        by_salt = [await num_accepted(running.client, cache_salt=salt) for salt in ("a", "b", "", "a", "b", "")]
    assert by_salt[:3] == [0, 0, 0]
    assert min(by_salt[3:]) > LENGTH / 2


async def test_of_another_key_nothing_is_proposed_whether_the_target_knows_salts_or_not(tmp_path: Path):
    for verifier in (salted(), TableVerifier(Table())):
        keys = tmp_path / "keys"
        lines = [{"name": name, "sha256": hashlib.sha256(name.encode()).hexdigest()} for name in ("alice", "bob")]
        keys.write_text("".join(json.dumps(line) + "\n" for line in lines))
        accepted = []
        settings = {"api_keys_file": str(keys), "client": {"api_key": "alice"}}
        async with (
            cluster([verifier], num_draft_tokens=None, lookup_history=1 << 16, **settings) as running,
            Client(f"127.0.0.1:{running.orchestrator.port}", api_key="bob") as bob,
        ):
            await sample(running.client, 9)
            for client in (running.client, bob, running.client, bob):
                accepted.append(await num_accepted(client))
        assert accepted[:2] == [0, 0]
        assert min(accepted[2:]) > LENGTH / 2


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_the_text_is_the_targets_own_whatever_the_history_says_and_whoever_leaves(temperature):
    # Few ids: most agreements lead to something else.
    table, chance = Table(vocab_size=6), random.Random(3)
    fields = {"temperature": temperature}
    async with cluster([TableVerifier(table)]) as running:
        alone = [
            await sample(running.client, first % 6, seed=first, num_draft_tokens=0, **fields) for first in range(20)
        ]
    async with cluster([TableVerifier(table)], num_draft_tokens=None, lookup_history=4096) as running:

        async def ask(first: int) -> Any:
            return await sample(running.client, first % 6, seed=first, **fields)

        async def leaves(first: int) -> None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ask(first), chance.uniform(0, 0.05))

        told = []
        for start in (*range(0, 20, 4), *range(0, 20, 4)):
            some = range(start, start + 4)
            *_, a, b, c, d = await asyncio.gather(
                *(leaves(chance.randrange(20)) for _ in range(2)), *(ask(first) for first in some)
            )
            told += [a, b, c, d]
        await running.settled()
    assert [list(each.token_ids) for each in told] == [list(each.token_ids) for each in alone] * 2
    counts = [each.finish.speculation for each in told]
    assert 0 < sum(each.num_accepted_lookup_tokens for each in counts) < sum(each.num_lookup_tokens for each in counts)
