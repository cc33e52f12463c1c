"""Replicas with another vocabulary are refused in words: the first id that differs, with both tokens."""

from __future__ import annotations

import asyncio
import dataclasses
from contextlib import AsyncExitStack
from typing import Any

import pytest

from draft_service.server import create_server as create_draft_server
from orchestrator.api.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec.cli.doctor import examine
from specdec.core.settings import EngineSettings
from specdec.runner.vocabulary import Vocabulary, read_vocabulary
from target_service.server import create_server as create_target_server
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.checkout import TOKENIZER
from tests.cluster import cluster

TOKENS = read_vocabulary(TOKENIZER).tokens
OTHER = (*TOKENS[:700], b"another", *TOKENS[701:])
TABLE = Table(len(TOKENS))


def with_tokens(model: Any, tokens: tuple[bytes, ...]) -> Any:
    fingerprint = Vocabulary(tokens).fingerprint
    fields = dict(vocab_size=len(tokens), tokenizer_fingerprint=fingerprint, tokens=tokens)
    model.info = dataclasses.replace(model.info, **fields)
    return model


async def told(target: tuple[bytes, ...], draft: tuple[bytes, ...]) -> tuple[str, str, str]:
    """The problems of target and draft to an orchestrator with the bundled tokenizer, and what a doctor finds."""
    servers = [
        create_target_server(with_tokens(TableVerifier(TABLE), target), EngineSettings()),
        create_draft_server(with_tokens(TableDrafter(TABLE), draft), EngineSettings()),
    ]
    async with AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        targets, drafts = ([f"127.0.0.1:{server.port}"] for server in servers)
        orchestrator = OrchestratorServer(OrchestratorSettings(target=targets, draft=drafts, tokenizer=str(TOKENIZER)))
        await orchestrator.start()
        stack.push_async_callback(orchestrator.stop)
        [one], [other] = orchestrator.targets.replicas, orchestrator.drafts.replicas
        async with asyncio.timeout(30):
            while any("not reached" in each.why_not or "yet" in each.why_not for each in (one, other)):
                await asyncio.sleep(0.01)
                if one.problem and not one.ready and "yet" in other.why_not:
                    break
            while True:
                _, findings = await examine(f"127.0.0.1:{orchestrator.port}")
                problems = " ".join(finding.what for finding in findings if finding.wrong)
                if "not reached yet" not in problems:  # as on a busy machine, whose probes may be late
                    return one.why_not, other.why_not, problems


async def test_a_draft_is_refused_with_the_first_id_that_differs_and_both_tokens() -> None:
    target, draft, doctor = await told(TOKENS, OTHER)
    named = f"id 700 is 'another', not {TOKENS[700].decode()!r}"
    assert target == ""
    assert named in draft
    assert named in doctor


async def test_a_target_is_refused_with_the_first_id_that_differs_from_the_tokenizer() -> None:
    target, _, _ = await told(OTHER, OTHER)
    assert f"another vocabulary than the tokenizer: id 700 is 'another', not {TOKENS[700].decode()!r}" in target


async def test_tokens_that_are_more_than_an_answer_may_have_leave_the_fingerprints() -> None:
    huge = tuple(b"%09d" % index for index in range(220_000))
    target, _, _ = await told(huge, TOKENS)
    assert f"has the vocabulary {Vocabulary(huge).fingerprint[:12]}, the tokenizer " in target


@pytest.mark.parametrize("num_lacking", [0, 1, 100])
async def test_a_draft_that_lacks_the_last_ids_is_used(num_lacking: int) -> None:
    assert await told(TOKENS, TOKENS[: len(TOKENS) - num_lacking]) == ("", "", "")


async def test_a_text_with_ids_that_the_draft_lacks_is_written_without_it() -> None:
    prompts = [{"token_ids": [5, 6, 7]}, {"token_ids": [5, len(TOKENS) - 1, 7]}]
    verifier, small = with_tokens(TableVerifier(TABLE), TOKENS), TOKENS[:-100]
    async with cluster([verifier], tokenizer=str(TOKENIZER)) as alone:
        expected = [(await alone.client.generate(token_ids=ids, max_tokens=30, seed=3))[0].token_ids for ids in prompts]
    drafter = with_tokens(TableDrafter(Table(len(small))), small)
    async with cluster([verifier], [drafter], tokenizer=str(TOKENIZER)) as running:
        found = [(await running.client.generate(token_ids=ids, max_tokens=30, seed=3))[0] for ids in prompts]
        assert [sample.token_ids for sample in found] == expected
        assert [sample.finish.speculation.num_drafts > 0 for sample in found] == [True, False]
        assert running.orchestrator.drafts.replicas[0].ready
