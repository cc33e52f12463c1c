"""Reading the grammars of requests: accounts take turns, and what is cancelled costs nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.api import grammars
from orchestrator.api.grammars import RequestGrammars
from orchestrator.request import Caller
from specdec.core.rounds import ModelInfo
from specdec.v1 import generation_pb2

TARGET = ModelInfo("target", "digest", vocab_size=8, tokenizer_fingerprint="", context_length=64)


class Sandbox:
    """Reads a grammar once its gate is open."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.begun: list[str] = []

    async def checked(self, form: str, text: str, reasoning: str) -> str:
        self.begun.append(text)
        await self.gate.wait()
        return text

    async def close(self) -> None: ...


async def new(monkeypatch: pytest.MonkeyPatch) -> tuple[RequestGrammars, Sandbox]:
    sandbox = Sandbox()

    async def model(*_: object) -> grammars._ModelGrammars:
        return grammars._ModelGrammars(sandbox, SimpleNamespace(start=lambda text, owner: None))  # type: ignore[arg-type]

    monkeypatch.setattr(grammars._ModelGrammars, "new", model)
    return RequestGrammars(Path("tokenizer.json")), sandbox


def read(request_grammars: RequestGrammars, regex: str, account: str = "a") -> asyncio.Task[grammars.Grammar]:
    message = generation_pb2.GenerateRequest(regex=regex)
    return asyncio.create_task(request_grammars.read(message, TARGET, Caller(account), prompt_end=""))


async def turns(count: int = 10) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_one_grammar_of_an_account_is_read_at_a_time_and_another_account_does_not_wait(monkeypatch) -> None:
    request_grammars, sandbox = await new(monkeypatch)
    tasks = [read(request_grammars, regex, account) for regex, account in (("1", "a"), ("2", "a"), ("3", "b"))]
    await turns()
    assert sandbox.begun == ["1", "3"]
    tasks[0].cancel()
    await turns()
    assert sandbox.begun == ["1", "3"], "what has begun keeps its turn to its end"
    sandbox.gate.set()
    assert [grammar.text for grammar in await asyncio.gather(*tasks[1:])] == ["2", "3"]


async def test_a_cancelled_request_takes_back_a_grammar_that_nothing_reads_yet(monkeypatch) -> None:
    request_grammars, sandbox = await new(monkeypatch)
    first, *others = [read(request_grammars, regex) for regex in ("1", "2", "3")]
    await turns()
    for task in others:
        task.cancel()
    sandbox.gate.set()
    assert (await first).text == "1"
    await turns()
    assert sandbox.begun == ["1"]


async def test_equal_grammars_are_read_once(monkeypatch) -> None:
    request_grammars, sandbox = await new(monkeypatch)
    tasks = [read(request_grammars, "1") for _ in range(3)]
    await turns()
    tasks[0].cancel()
    sandbox.gate.set()
    assert [grammar.text for grammar in await asyncio.gather(*tasks[1:])] == ["1", "1"]
    assert sandbox.begun == ["1"]
