"""``specdec chat``, ``specdec models`` and ``specdec generate --chat``, as their users meet them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from specdec.cli import models
from specdec.cli.chat import summary
from specdec.client import Sample
from specdec.v1 import generation_pb2
from tests.checkout import DEMO
from tests.cluster import Cluster, cluster
from tests.gateway.conftest import models as table_models
from tests.specdec.cli.commands import called

pytestmark = pytest.mark.slow


@pytest_asyncio.fixture
async def served() -> AsyncIterator[Cluster]:
    verifier, drafter = table_models()
    async with cluster([verifier], [drafter], tokenizer=str(DEMO / "target"), model_name="small") as running:
        yield running


async def said(running: Cluster, text: str, *flags: str) -> tuple[int, str, str]:
    """What ``specdec chat`` prints when these lines come from a pipe."""
    address = f"--address=127.0.0.1:{running.orchestrator.port}"
    return await called("chat", address, "--max-tokens=12", "--temperature=0", *flags, stdin=text)


async def answer(running: Cluster, *messages: tuple[str, str]) -> str:
    chat = {"messages": [{"role": role, "content": content} for role, content in messages]}
    [sample] = await running.client.generate(chat=chat, max_tokens=12, temperature=0.0)
    return sample.text


async def test_a_conversation_is_remembered_until_it_is_reset(served: Cluster) -> None:
    first = await answer(served, ("user", "one"))
    second = await answer(served, ("user", "one"), ("assistant", first), ("user", "two"))
    after_system = await answer(served, ("system", "Be short."), ("user", "two"))
    status, out, err = await said(served, "one\ntwo\n/reset\n/system Be short.\ntwo\n/exit\nthree\n")
    assert (status, err) == (0, "")
    places = [out.find(text) for text in (first, second, after_system)]
    assert -1 not in places, out
    assert places == sorted(places)
    assert out.count("12 tokens, ") == 3
    assert "draft tokens accepted, length]" in out


async def test_what_is_refused_is_told_and_forgotten(served: Cluster) -> None:
    status, out, err = await said(served, "one\n/nope\n", "--num-draft-tokens=99")
    assert status == 0
    assert "num_draft_tokens: must be at most 64, not 99 [INVALID_ARGUMENT]" in err
    assert "There is no /nope" in out


async def test_a_prompt_can_be_a_message(served: Cluster) -> None:
    address = f"--address=127.0.0.1:{served.orchestrator.port}"
    flags = ("--max-tokens=12", "--temperature=0", address)
    status, out, _ = await called("generate", "--chat", "one", *flags)
    assert (status, out) == (0, await answer(served, ("user", "one")) + "\n")


async def test_the_models_are_shown_in_80_columns_and_as_json(served: Cluster) -> None:
    address = f"--address=127.0.0.1:{served.orchestrator.port}"
    status, out, err = await called("models", address)
    assert (status, err) == (0, "")
    assert out.startswith("small\n  target    table-target, 1 ready")
    assert "  draft     table-draft, 1 ready" in out
    assert "  chat      yes" in out
    assert max(map(len, out.splitlines())) <= 80
    status, out, _ = await called("models", address, "--json")
    assert (status, json.loads(out)["model_name"]) == (0, "small")
    assert models.lines(generation_pb2.GetServerInfoResponse()) == ["no target is ready"]


async def test_without_a_server_the_status_is_1() -> None:
    status, _, err = await called("models", "--address=127.0.0.1:1")
    assert status == 1
    assert "[REPLICA_LOST]" in err


def test_a_summary_fits_into_80_columns() -> None:
    sample = Sample(token_ids=[1] * 99_999)
    sample.finish.speculation.num_draft_tokens = sample.finish.speculation.num_accepted_tokens = 99_999
    line = summary(sample, 1.0)
    assert line == "[99999 tokens, 99999.0/s, 99999 of 99999 draft tokens accepted, interrupted]"
    assert len(line) <= 80
