"""Requests with API keys, over gRPC: what each may do, learn and use."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
import threading
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from orchestrator.api.prompts import Prompts
from specdec.cli.processes import is_serving
from specdec.client import Client
from specdec.core.errors import InvalidArgument, NoReplica, Overloaded, Unauthenticated
from specdec.core.sequence import SequenceSpec
from specdec.core.settings import ServiceSettings
from specdec.telemetry import setup as telemetry
from specdec.transport import rpc
from specdec.v1 import generation_pb2, generation_pb2_grpc
from target_service.language_model import LmVerifier
from testing.misbehaving import Misbehaving
from testing.patience import eventually
from testing.table_model import Table, TableVerifier
from tests.checkout import DEMO
from tests.cluster import Cluster, cluster
from tests.contract.bad import runner
from tests.orchestrator.api.conftest import line, write

REQUEST: dict[str, Any] = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 5, "seed": 1}


@asynccontextmanager
async def guarded(keys: Path, verifier: Any = None) -> AsyncIterator[Cluster]:
    drafters = [LanguageModelDrafter(runner())]
    client = {"api_key": "a-token"}
    async with cluster([verifier or LmVerifier(runner())], drafters, client=client, api_keys_file=str(keys)) as running:
        yield running


@asynccontextmanager
async def of_texts(keys: Path) -> AsyncIterator[Cluster]:
    verifier = TableVerifier(Table(vocab_size=4096, context_length=1024))
    verifier.info = dataclasses.replace(verifier.info, tokenizer_fingerprint="")
    settings = {"client": {"api_key": "a-token"}, "api_keys_file": str(keys), "tokenizer": str(DEMO / "target")}
    async with cluster([verifier], [], **settings) as running:
        yield running


async def test_a_prompt_of_one_key_is_computed_again_for_another(keys: Path) -> None:
    with keys.open("a") as stream:
        stream.writelines([line("bob", "b-token"), line("c", "c", shared=True), line("d", "d", shared=True)])
    opened: list[bytes] = []

    class Noting(LmVerifier):
        def open(self, spec: SequenceSpec) -> Any:
            opened.append(spec.cache_salt)
            return super().open(spec)

    async with guarded(keys, Noting(runner())) as running:
        for token in ("a-token", "a-token", "b-token", "c", "d"):
            async with Client(f"127.0.0.1:{running.orchestrator.port}", api_key=token) as client:
                await client.generate(**REQUEST)
    alice, again, bob, *shared = opened
    assert alice == again != bob
    assert shared == [b"", b""]
    assert b"" not in (alice, bob)


async def test_without_a_known_token_nothing_is_told_but_health(keys: Path) -> None:
    async with guarded(keys) as running:
        address = f"127.0.0.1:{running.orchestrator.port}"
        for wrong in ("", "b-token", "a-token2"):
            async with Client(address, api_key=wrong) as client:
                with pytest.raises(Unauthenticated):
                    await client.generate(**REQUEST)
                with pytest.raises(Unauthenticated):
                    await client.server_info()
        async with rpc.channel(address) as channel:
            call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
                generation_pb2.GenerateRequest(**REQUEST), metadata=rpc.bearer("wrong")
            )
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call.read()
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert await is_serving(address)
        [sample] = await running.client.generate(**REQUEST)
        assert len(sample.token_ids) == 5
        assert (await running.client.server_info()).HasField("target")


async def test_only_an_operator_is_told_where_replicas_are_and_what_is_wrong_with_them(keys: Path) -> None:
    with keys.open("a") as stream:
        stream.write(line("root", "r-token", operator=True))
    settings = {"client": {"api_key": "r-token"}, "api_keys_file": str(keys), "target_wait_s": 0.05}
    async with cluster([LmVerifier(runner())], **settings) as running:
        [target] = running.orchestrator.targets.replicas
        await running.targets[0].stop()
        async with Client(f"127.0.0.1:{running.orchestrator.port}", api_key="a-token") as alice:
            with pytest.raises(NoReplica) as refused:
                await alice.generate(**REQUEST)
            assert str(refused.value) == "no target could be reached in 0.05 s"
            [told] = (await alice.server_info()).replicas
            assert (told.address, told.role, told.ready, told.problem) == ("", "target", False, "")
        with pytest.raises(NoReplica, match=target.address):
            await running.client.generate(**REQUEST)
        [told] = (await running.client.server_info()).replicas
        assert told.address == target.address
        assert told.problem


async def test_over_its_quota_a_key_is_told_when_to_come_back(keys: Path) -> None:
    async with guarded(keys) as running:
        with pytest.raises(InvalidArgument, match="n: this key may have 2 samples"):
            await running.client.generate(**REQUEST | {"n": 3})
        samples = await running.client.generate(**REQUEST | {"n": 2, "max_tokens": 40})
        assert [len(sample.token_ids) for sample in samples] == [40, 40]
        with pytest.raises(Overloaded, match="60 tokens per minute") as refused:
            await running.client.generate(**REQUEST)
        # 83 tokens were used, of 60: 24 seconds, less what came back meanwhile.
        assert 1 < refused.value.retry_after_s <= 24
        write(keys, line("alice", "a-token"))
        await running.client.generate(**REQUEST)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.tokenize(text="def f(x): return x\n" * 40),
        lambda client: client.detokenize([5] * 400),
        lambda client: client.generate(text="a", max_tokens=1, prediction="def f(x): return x\n" * 40),
        lambda client: client.generate(**REQUEST | {"max_tokens": 600, "resume": {0: {"token_ids": [5] * 400}}}),
    ],
    ids=["tokenize", "detokenize", "prediction", "resume"],
)
async def test_whatever_a_caller_sends_to_be_read_counts_against_its_quota(keys: Path, call: Any) -> None:
    write(keys, line("alice", "a-token", max_sequences=2, tokens_per_minute=300))
    async with of_texts(keys) as running:
        await call(running.client)
        with pytest.raises(Overloaded, match="300 tokens per minute"):
            await running.client.tokenize(text="a")


async def test_texts_occupy_the_samples_of_a_key(keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Semaphore(0), threading.Event()

    def encoded(*_: object) -> array[int]:
        begun.release()
        assert end.wait(30)
        return array("I", [1])

    monkeypatch.setattr(Prompts, "encoded", encoded)
    write(keys, line("alice", "a-token", max_sequences=2))
    async with of_texts(keys) as running:
        busy = [asyncio.create_task(running.client.tokenize(text="a")) for _ in range(2)]
        for _ in busy:
            assert await asyncio.to_thread(begun.acquire, timeout=30)
        with pytest.raises(Overloaded, match="alice has 2 of its 2 samples"):
            await running.client.tokenize(text="a")
        with pytest.raises(Overloaded, match="alice has 2 of its 2 samples"):
            await running.client.detokenize([1])
        end.set()
        await asyncio.gather(*busy)
        await running.client.detokenize([1])


async def test_a_key_that_is_busy_does_not_keep_others_out(keys: Path) -> None:
    with keys.open("a") as stream:
        stream.write(line("bob", "b-token"))
    verifier = Misbehaving(LmVerifier(runner()))
    async with guarded(keys, verifier) as running, AsyncExitStack() as stack:
        verifier.gate.clear()
        busy = [asyncio.create_task(running.client.generate(**REQUEST)) for _ in range(2)]
        await eventually(lambda: running.orchestrator.live_sequences >= 2)
        with pytest.raises(Overloaded, match="alice has 2 of its 2 samples"):
            await running.client.generate(**REQUEST)
        bob = await stack.enter_async_context(Client(f"127.0.0.1:{running.orchestrator.port}", api_key="b-token"))
        other = asyncio.create_task(bob.generate(**REQUEST))
        await eventually(lambda: running.orchestrator.live_sequences >= 3)
        verifier.gate.set()
        await asyncio.gather(*busy, other)
        await running.client.generate(**REQUEST)


async def test_tokens_are_never_logged(keys: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Neither the right one nor a wrong one, at any level."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    telemetry.set_up("test", ServiceSettings(log_level="DEBUG"))
    try:
        async with guarded(keys) as running:
            await running.client.generate(**REQUEST)
            async with Client(f"127.0.0.1:{running.orchestrator.port}", api_key="wrong-token") as client:
                with pytest.raises(Unauthenticated) as refused:
                    await client.generate(**REQUEST)
                said = str(refused.value) + repr(client) + repr(vars(running.client.__class__))
            write(keys, "{", "a-token")
            await running.client.generate(**REQUEST)
    finally:
        root.handlers[:], level = before
        root.setLevel(level)
    logged = capsys.readouterr().err
    assert '"request ended"' in logged
    assert '"api_key": "alice"' in logged
    assert "are not used" in logged
    for secret in ("a-token", "wrong-token", hashlib.sha256(b"a-token").hexdigest()):
        assert secret not in logged + said
