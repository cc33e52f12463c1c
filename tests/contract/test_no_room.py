"""A good request without room, time or a target, or with a draft of another model; and what is left of it."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.core.errors import DeadlineExceeded, InvalidArgument, NoReplica, Overloaded, ReplicaLost
from target_service.language_model import LmVerifier
from testing.misbehaving import Misbehaving
from testing.patience import PATIENCE_S, eventually
from testing.raw import draft, orchestrator, target
from tests.cluster import cluster
from tests.contract.bad import runner
from tests.contract.refusal import IDS, generate_request, refusal
from tests.instruments import total


async def test_a_full_queue_is_resource_exhausted_with_a_time_to_come_back() -> None:
    verifier = Misbehaving(LmVerifier(runner()))
    async with cluster([verifier], max_live_sequences=3, max_waiting_requests=0) as running:
        verifier.gate.clear()
        held = asyncio.create_task(running.client.generate(token_ids=IDS, n=3, max_tokens=4, seed=1))
        await eventually(lambda: running.orchestrator.live_sequences >= 3)
        error = await refusal(running, generate_request())
        assert isinstance(error, Overloaded)
        assert error.retry_after_s > 0
        verifier.gate.set()
        assert [len(sample.token_ids) for sample in await held] == [4, 4, 4]
        assert len((await running.client.generate(token_ids=IDS, n=3, max_tokens=4))[0].token_ids) == 4


async def test_more_samples_than_are_ever_served_at_a_time_are_refused() -> None:
    async with cluster([LmVerifier(runner())], max_live_sequences=3) as running:
        error = await refusal(running, generate_request(n=4))
        assert isinstance(error, InvalidArgument)
        assert [name for name, _ in error.violations] == ["n"]


async def test_the_callers_deadline_ends_the_request_and_frees_everything() -> None:
    verifier, drafter = Misbehaving(LmVerifier(runner())), LanguageModelDrafter(runner(blend=(2, 0.3)))
    async with cluster([verifier], [drafter]) as running:
        verifier.gate.clear()
        error = await refusal(running, generate_request(n=4), timeout_s=0.2)
        assert isinstance(error, DeadlineExceeded)
        await eventually(lambda: not running.orchestrator.live_sequences)
        verifier.gate.set()
        await running.settled(PATIENCE_S)
        assert len((await running.client.generate(token_ids=IDS, max_tokens=4))[0].token_ids) == 4


async def test_the_servers_own_deadline_ends_the_request_and_frees_everything() -> None:
    verifier, drafter = Misbehaving(LmVerifier(runner())), LanguageModelDrafter(runner(blend=(2, 0.3)))
    async with cluster([verifier], [drafter], request_timeout_s=0.2) as running:
        verifier.gate.clear()
        error = await refusal(running, generate_request(n=4))
        assert isinstance(error, DeadlineExceeded)
        assert running.orchestrator.live_sequences == 0
        verifier.gate.set()
        await running.settled(PATIENCE_S)


async def test_without_a_target_a_request_is_unavailable_and_says_what_is_wrong() -> None:
    async with cluster([LmVerifier(runner())], target_wait_s=0.1) as running:
        await running.targets[0].stop()
        error = await refusal(running, generate_request())
        assert isinstance(error, NoReplica | ReplicaLost)
        assert f"127.0.0.1:{running.targets[0].port}" in str(error)


@pytest.mark.parametrize("other", [dict(vocab_size=9), dict(name="x")])
async def test_a_draft_with_another_vocabulary_is_refused_and_the_target_serves_alone(other: dict[str, Any]) -> None:
    stranger = runner(**other)
    if "name" in other:
        stranger.info = dataclasses.replace(stranger.info, tokenizer_fingerprint="f" * 64)
    async with cluster([LmVerifier(runner())]) as alone:
        [expected] = await alone.client.generate(token_ids=IDS, max_tokens=20, seed=1)
    async with (
        target(LmVerifier(runner())) as targets,
        draft(LanguageModelDrafter(stranger)) as service,
        orchestrator([targets.server.port], [service.server.port]) as (_, client),
    ):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                info = await client.server_info()
                replica = next(replica for replica in info.replicas if replica.role == "draft")
                if "has the vocabulary" in replica.problem:
                    break
                await asyncio.sleep(0.02)
        assert not replica.ready
        assert not info.HasField("draft")
        theirs = (str(stranger.info.vocab_size), "8") if "name" not in other else ("f" * 12, "without a name")
        assert all(word in replica.problem for word in theirs), replica.problem
        [sample] = await client.generate(token_ids=IDS, max_tokens=20, seed=1)
        assert sample.token_ids == expected.token_ids
        assert sample.finish.speculation.num_drafts == 0
        assert (await service.load()).live_sequences == 0


async def test_a_request_for_which_the_pool_is_full_just_now_waits_and_is_served(measured: Any) -> None:
    verifier = LmVerifier(runner(num_slots=40))
    async with cluster([verifier]) as running:
        targets = running.orchestrator.targets
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, len(targets.waiting_for_room))
                await asyncio.sleep(0.001)

        watching = asyncio.create_task(watch())
        async with asyncio.timeout(PATIENCE_S):
            both = await asyncio.gather(
                *(running.client.generate(token_ids=IDS, max_tokens=30, seed=seed) for seed in (1, 2))
            )
        assert [len(samples[0].token_ids) for samples in both] == [30, 30]
        await running.settled(PATIENCE_S)
        watching.cancel()
        assert most == 1, "one of them waited"
        told = total(measured)
        assert told["specdec.waiting_for_room"] == {(("service", "orchestrator"),): 0}
        [refused] = told["specdec.refused_opens"].values()
        assert refused >= 1
