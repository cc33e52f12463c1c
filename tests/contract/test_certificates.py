"""TLS from end to end: names in certificates decide which service may call which, and refusals come in words."""

from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.server import create_server as create_draft_server
from orchestrator.api.server import OrchestratorServer
from specdec.client import Client
from specdec.core.errors import NoReplica, PermissionDenied, ReplicaLost, SpecdecError
from specdec.core.settings import EngineSettings
from specdec.security import dev_ca as certificates
from specdec.security import tls
from specdec.security.tls import Tls
from specdec.security.tls_diagnosis import tls_problem
from specdec.transport import rpc
from specdec.v1 import draft_pb2_grpc
from target_service.language_model import LmVerifier
from target_service.server import create_server as create_target_server
from testing.certificates import caller, files, refused_targets, stranger
from testing.patience import eventually
from testing.raw import orchestrator, started
from tests.cluster import cluster
from tests.contract.bad import runner
from tests.contract.over_tls import PATIENCE_S, REQUEST, target, unary, verify


async def test_with_the_right_certificates_the_text_is_the_same(ours: Path) -> None:
    texts = []
    for directory in (None, ours):
        drafter = LanguageModelDrafter(runner(blend=(2, 0.3)))
        async with cluster([LmVerifier(runner())], [drafter], directory) as running:
            [sample] = await running.client.generate(**REQUEST)
            texts.append(sample.token_ids)
            assert sample.finish.speculation.num_drafts > 0
            if directory:
                address = running.orchestrator.targets.replicas[0].address
                with pytest.raises(ReplicaLost):
                    await unary(address, None)
            await running.settled()
    assert texts[0] == texts[1]


async def test_only_the_name_orchestrator_opens_streams(ours: Path) -> None:
    async with target(ours) as server:
        address = f"127.0.0.1:{server.port}"
        assert await verify(address, caller(ours, "orchestrator")) == 3
        for owner in ("draft", "target", "operator"):
            with pytest.raises(PermissionDenied, match=f"for orchestrator alone.* issued for {owner}, localhost"):
                await verify(address, caller(ours, owner))
            assert (await unary(address, caller(ours, owner))).model.vocab_size == 8
        assert server.load.open_streams == 0


async def test_a_target_may_not_open_a_draft(ours: Path) -> None:
    drafter = LanguageModelDrafter(runner())
    async with (
        started(create_draft_server(drafter, EngineSettings(**files(ours, "draft")))) as server,
        rpc.channel(f"127.0.0.1:{server.port}", caller(ours, "target"), "draft") as channel,
    ):
        call = draft_pb2_grpc.DraftServiceStub(channel).Draft(timeout=PATIENCE_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            async for _ in call:
                pass
        assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED


async def test_a_caller_without_a_good_certificate_does_not_get_in_and_is_told_why(ours: Path, theirs: Path) -> None:
    mixed = Tls(files(ours, "orchestrator")["tls_ca"], *list(files(theirs, "orchestrator").values())[:2])
    async with target(ours) as server:
        address = f"127.0.0.1:{server.port}"
        for tls, words in (
            (None, "it speaks TLS, and this side has no certificates (tls_ca)"),
            (stranger(ours), "it wants a certificate of its callers, and this side has none (tls_cert, tls_key)"),
            (mixed, "it does not accept this side's certificate: it trusts another CA"),
            (caller(theirs, "orchestrator"), "its certificate is not from a CA that tls_ca names"),
        ):
            with pytest.raises(ReplicaLost):
                await unary(address, tls)
            with pytest.raises(ReplicaLost):
                await verify(address, tls)
            assert words in await tls_problem(address, tls, "target")
        assert await tls_problem(address, caller(ours, "orchestrator"), "target") == ""
        assert await verify(address, caller(ours, "orchestrator")) == 3


async def test_a_caller_does_not_talk_to_another_service(ours: Path) -> None:
    """A draft that sits at the target's address gets nothing."""
    async with target(ours) as server:
        address = f"127.0.0.1:{server.port}"
        for name in ("draft", "orchestrator"):
            with pytest.raises(ReplicaLost):
                await unary(address, caller(ours, "orchestrator"), name)
            assert f"not issued for {name}" in await tls_problem(address, caller(ours, "orchestrator"), name)


@pytest.fixture
def expired(own: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Certificates after their time, in a process that loaded them before."""
    monkeypatch.setattr(Tls, "_check", lambda *_: None)
    certificates.make(own, days=-1)
    return own


async def test_an_expired_certificate_does_not_get_in(ours: Path, expired: Path) -> None:
    old, good = caller(expired, "orchestrator"), caller(ours, "orchestrator")
    async with target(ours) as server:
        address = f"127.0.0.1:{server.port}"
        with pytest.raises(ReplicaLost):
            await verify(address, old)
        assert "it does not accept this side's certificate" in await tls_problem(address, old, "target")
        assert await verify(address, good) == 3
    async with target(expired) as server:
        address = f"127.0.0.1:{server.port}"
        with pytest.raises(ReplicaLost):
            await verify(address, good)
        assert await tls_problem(address, good, "target") == "its certificate has expired"


async def problem(running: OrchestratorServer, words: str) -> None:
    """Returns once the orchestrator says this of its target."""
    [replica] = running.targets.replicas
    await eventually(lambda: words in replica.problem)


async def test_an_orchestrator_in_the_clear_is_told_that_its_target_speaks_tls(ours: Path) -> None:
    async with target(ours) as server, orchestrator([server.port]) as (running, _):
        await problem(running, "it speaks TLS, and this side has no certificates")


@pytest.mark.parametrize("words", refused_targets(Path(), Path()))
async def test_the_orchestrator_says_why_it_does_not_use_a_target(words: str, ours: Path, theirs: Path) -> None:
    """And falls back to nothing: no request goes out in the clear or to another service."""
    directory, owner = refused_targets(ours, theirs)[words]
    settings = EngineSettings(**files(directory, owner)) if directory else EngineSettings()
    if owner == "draft":
        server = create_draft_server(LanguageModelDrafter(runner()), settings)
    else:
        server = create_target_server(LmVerifier(runner()), settings)
    await server.start()
    try:
        async with orchestrator([server.port], target_wait_s=0.1, **files(ours, "orchestrator")) as (running, _):
            await problem(running, words)
            async with Client(f"127.0.0.1:{running.port}", tls=stranger(ours)) as client:
                with pytest.raises(SpecdecError, match="no target could be reached"):
                    await client.generate(**REQUEST)
            assert not running.targets.replicas[0].ready
        assert server.load.open_streams == 0
    finally:
        await server.stop()


async def test_a_target_that_refuses_the_orchestrator_is_ejected(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not tried again and again. Clients hear that there is no target."""
    async with target(ours) as server:
        monkeypatch.setattr(tls, "of", lambda *_: caller(ours, "draft"))
        async with orchestrator([server.port], target_wait_s=0.1) as (running, _):
            await problem(running, "ejected: it refuses this orchestrator: this call is for orchestrator")
            async with Client(f"127.0.0.1:{running.port}", tls=stranger(ours), tls_name="draft") as client:
                with pytest.raises(NoReplica, match="issued for draft"):
                    await client.generate(**REQUEST)
