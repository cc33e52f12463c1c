"""A draft that wants a text of its own and lies about what it drew: how much of that text the output has."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.client import Sample
from specdec.core.errors import InvalidArgument
from specdec.v1 import common_pb2
from target_service import decision
from target_service.language_model import LmVerifier
from tests.cluster import cluster
from tests.faults.test_drafts import assert_ejected
from tests.faults.undisturbed import BLOCK, COUPLED, TOKEN, assert_same, generate
from tests.models.lying import LyingDrafter, Scheme, barefaced, scheming
from tests.models.table_runner import TableRunner

LENGTH = 60
WANTED = [7, 3, 1, 12, 30, 22, 5, 19, 2, 28] * 6
"""Of 64 tokens, which the target finds about equally likely."""

table = partial(TableRunner, 64, seed=1, order=1)


def verifier() -> LmVerifier:
    return LmVerifier(table())


def liar(scheme: Scheme) -> LyingDrafter:
    return LyingDrafter(table().info, WANTED, scheme)


def request(method: str) -> dict[str, Any]:
    return {"verification": method, "max_tokens": LENGTH, "temperature": 1.0}


def share(samples: list[Sample]) -> float:
    """The share of the output that is the draft's text."""
    matches = [sum(map(int.__eq__, sample.token_ids, WANTED)) for sample in samples]
    return sum(matches) / (LENGTH * len(samples))


async def alone(method: str) -> list[list[int]]:
    async with cluster([verifier()]) as running:
        return [sample.token_ids for sample in await generate(running.client, num_draft_tokens=0, **request(method))]


@pytest.mark.parametrize("method", [COUPLED, TOKEN, BLOCK])
async def test_a_draft_that_drew_another_token_changes_nothing(method: str) -> None:
    async with cluster([verifier()], [liar(barefaced)]) as running:
        samples = await generate(running.client, **request(method))
        assert_same(samples, await alone(method))
        assert share(samples) < 0.1
        if method != COUPLED:  # under which any token may be proposed
            await assert_ejected(running.client)
        await running.settled()


@pytest.mark.parametrize("method", [TOKEN, BLOCK])
async def test_a_draft_that_is_believed_writes_the_text(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    """Why no draft is: without the target's own race this one writes all but the last token of each round."""
    monkeypatch.setattr(decision, "drawn_as_said", lambda chains, _: [True] * len(chains))
    async with cluster([verifier()], [liar(barefaced)]) as running:
        assert share(await generate(running.client, **request(method))) > 0.75


@pytest.mark.parametrize("method", [COUPLED, TOKEN, BLOCK])
async def test_a_draft_that_chooses_its_distributions_steers_token_and_block_alone(method: str) -> None:
    """docs/security.md says that it can: its draws are true, but it knew the noise when it chose the distributions."""
    async with cluster([verifier()], [liar(scheming)]) as running:
        samples = await generate(running.client, **request(method))
        assert 0.2 < share(samples) < 0.6 if method != COUPLED else share(samples) < 0.1
        await running.settled()


@pytest.mark.parametrize("method", [TOKEN, BLOCK])
async def test_the_other_drafts_go_on(method: str) -> None:
    """Of two drafts the one that lies is ejected, and the sequences that had it continue with the other."""
    honest = LanguageModelDrafter(table(blend=(2, 0.3)))
    async with cluster([verifier()], [liar(barefaced), honest]) as running:
        samples = await generate(running.client, **request(method))
        assert share(samples) < 0.1
        assert all(sample.finish.speculation.num_accepted_tokens > 5 for sample in samples)
        assert sorted(replica.ready for replica in running.orchestrator.drafts.replicas) == [False, True]
        await running.settled()


async def test_a_method_that_the_operator_forbids_is_refused_by_name() -> None:
    async with cluster([verifier()], [liar(barefaced)], methods=["coupled", "block"]) as running:
        with pytest.raises(InvalidArgument, match=r"verification: token is not allowed .*, only coupled, block"):
            await generate(running.client, **request(TOKEN))
        assert len(await generate(running.client, **request(BLOCK))) == 3
        allowed = (await running.client.server_info()).methods
        assert [common_pb2.VerificationMethod.Name(each) for each in allowed] == [COUPLED, BLOCK]
