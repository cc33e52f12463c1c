"""Who may call whom, over TLS from end to end: names in certificates decide, and refusals come in words."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.server import create_server as create_draft_server
from orchestrator.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec import certificates, rpc, tls
from specdec.client import Client
from specdec.errors import NoReplica, PermissionDenied, ReplicaLost, SpecdecError
from specdec.model_service import ModelServer
from specdec.settings import ServiceSettings
from specdec.tls import Tls
from specdec.tls_trouble import tls_trouble
from specdec.v1 import common_pb2, draft_pb2_grpc, target_pb2, target_pb2_grpc
from target_service.lm_verifier import LmVerifier
from target_service.server import create_server as create_target_server
from tests.certificates import caller, files, stranger
from tests.cluster import cluster
from tests.contract.bad import runner
from tests.contract.raw import target_open

REQUEST: dict[str, Any] = {"token_ids": {"token_ids": [1, 2, 3]}, "max_tokens": 40, "seed": 1}
PATIENCE_S = 20.0


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ours")
    certificates.make(directory)
    return directory


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another CA."""
    directory = tmp_path_factory.mktemp("theirs")
    certificates.make(directory)
    return directory


@pytest.fixture
def own(ours: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(ours, tmp_path / "own"))


@asynccontextmanager
async def target(directory: Path | None, **settings: Any) -> AsyncIterator[ModelServer]:
    own = files(directory, "target") if directory else {}
    server = create_target_server(LmVerifier(runner()), ServiceSettings(**own, **settings))
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


async def unary(address: str, tls: Tls | None, name: str = "target") -> common_pb2.GetModelInfoResponse:
    async with rpc.channel(address, tls, name) as channel:
        stub = target_pb2_grpc.TargetServiceStub(channel)
        try:
            answer: common_pb2.GetModelInfoResponse = await stub.GetModelInfo(
                common_pb2.GetModelInfoRequest(), timeout=PATIENCE_S
            )
        except grpc.aio.AioRpcError as error:
            raise rpc.error_of(error) from error
        return answer


async def verify(address: str, tls: Tls | None) -> int:
    """The base of the verdict on an open."""
    async with rpc.channel(address, tls, "target") as channel:
        call = target_pb2_grpc.TargetServiceStub(channel).Verify(timeout=PATIENCE_S)
        try:
            await call.write(target_pb2.VerifyRequest(opens=[target_open(1)]))
            while not (response := await call.read()).verdicts:
                pass
            return int(response.verdicts[0].base)
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, AttributeError):
            error = grpc.aio.AioRpcError(
                await call.code(), await call.initial_metadata(), await call.trailing_metadata(), await call.details()
            )
            raise rpc.error_of(error) from None
        finally:
            call.cancel()


# --- end to end ---------------------------------------------------------------------------------------------


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
            with pytest.raises(PermissionDenied, match=f"for orchestrator alone.* made out to {owner}, localhost"):
                await verify(address, caller(ours, owner))
            assert (await unary(address, caller(ours, owner))).model.vocab_size == 8
        assert server.load.open_streams == 0


async def test_a_target_may_not_open_a_draft(ours: Path) -> None:
    drafter = LanguageModelDrafter(runner())
    server = create_draft_server(drafter, ServiceSettings(**files(ours, "draft")))
    await server.start()
    try:
        async with rpc.channel(f"127.0.0.1:{server.port}", caller(ours, "target"), "draft") as channel:
            call = draft_pb2_grpc.DraftServiceStub(channel).Draft(timeout=PATIENCE_S)
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                async for _ in call:
                    pass
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    finally:
        await server.stop()


async def test_who_has_no_good_certificate_does_not_get_in_and_is_told_why(ours: Path, theirs: Path) -> None:
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
            assert words in await tls_trouble(address, tls, "target")
        assert await tls_trouble(address, caller(ours, "orchestrator"), "target") == ""
        assert await verify(address, caller(ours, "orchestrator")) == 3


async def test_a_caller_does_not_talk_to_another_service(ours: Path) -> None:
    """A draft that sits at the target's address gets nothing."""
    async with target(ours) as server:
        address = f"127.0.0.1:{server.port}"
        for name in ("draft", "orchestrator"):
            with pytest.raises(ReplicaLost):
                await unary(address, caller(ours, "orchestrator"), name)
            assert f"not made out to {name}" in await tls_trouble(address, caller(ours, "orchestrator"), name)


@pytest.fixture
def expired(own: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As they are after their time, in a process that has them since before."""
    monkeypatch.setattr(Tls, "_check", lambda *_: None)
    certificates.make(own, days=-1)
    return own


async def test_who_has_expired_does_not_get_in(ours: Path, expired: Path) -> None:
    old, good = caller(expired, "orchestrator"), caller(ours, "orchestrator")
    async with target(ours) as server:
        address = f"127.0.0.1:{server.port}"
        with pytest.raises(ReplicaLost):
            await verify(address, old)
        assert "it does not accept this side's certificate" in await tls_trouble(address, old, "target")
        assert await verify(address, good) == 3
    async with target(expired) as server:
        address = f"127.0.0.1:{server.port}"
        with pytest.raises(ReplicaLost):
            await verify(address, good)
        assert await tls_trouble(address, good, "target") == "its certificate has expired"


WRONG = {
    "a target in the clear": (None, "target", "it does not speak TLS"),
    "a target of another CA": ("theirs", "target", "not from a CA that tls_ca names"),
    "a draft in the target's place": ("ours", "draft", "not made out to target"),
}


async def test_an_orchestrator_in_the_clear_is_told_that_its_target_speaks_tls(ours: Path) -> None:
    async with target(ours) as server:
        orchestrator = OrchestratorServer(OrchestratorSettings(target=[f"127.0.0.1:{server.port}"]))
        await orchestrator.start()
        try:
            [replica] = orchestrator.targets.replicas
            async with asyncio.timeout(PATIENCE_S):
                while "it speaks TLS, and this side has no certificates" not in replica.problem:
                    await asyncio.sleep(0.01)
        finally:
            await orchestrator.stop()


@pytest.mark.parametrize("kind", WRONG)
async def test_the_orchestrator_says_why_it_does_not_use_a_target(kind: str, ours: Path, theirs: Path) -> None:
    """And falls back to nothing: no request goes out in the clear or to somebody else."""
    ca, owner, words = WRONG[kind]
    directory = {"ours": ours, "theirs": theirs, None: None}[ca]
    settings = ServiceSettings(**files(directory, owner)) if directory else ServiceSettings()
    if owner == "draft":
        server = create_draft_server(LanguageModelDrafter(runner()), settings)
    else:
        server = create_target_server(LmVerifier(runner()), settings)
    await server.start()
    orchestrator = OrchestratorServer(
        OrchestratorSettings(target=[f"127.0.0.1:{server.port}"], target_wait_s=1.0, **files(ours, "orchestrator"))
    )
    await orchestrator.start()
    try:
        async with Client(f"127.0.0.1:{orchestrator.port}", tls=stranger(ours)) as client:
            with pytest.raises(SpecdecError, match="no target could be reached"):
                await client.generate(**REQUEST)
            [replica] = (await client.server_info()).replicas
            assert not replica.ready
            assert words in replica.problem
        assert server.load.open_streams == 0
    finally:
        await orchestrator.stop()
        await server.stop()


async def test_a_target_that_refuses_the_orchestrator_is_set_aside(ours: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not tried again and again; what clients hear is that there is no target."""
    async with target(ours) as server:
        monkeypatch.setattr(tls, "of", lambda *_: caller(ours, "draft"))
        orchestrator = OrchestratorServer(OrchestratorSettings(target=[f"127.0.0.1:{server.port}"], target_wait_s=1.0))
        await orchestrator.start()
        try:
            [replica] = orchestrator.targets.replicas
            async with asyncio.timeout(PATIENCE_S):
                while "set aside: it refuses this orchestrator: this call is for orchestrator" not in replica.problem:
                    await asyncio.sleep(0.01)
            async with Client(f"127.0.0.1:{orchestrator.port}", tls=stranger(ours), tls_name="draft") as client:
                with pytest.raises(NoReplica, match="made out to draft"):
                    await client.generate(**REQUEST)
        finally:
            await orchestrator.stop()


# --- health -------------------------------------------------------------------------------------------------


async def health(address: str, service: str = "") -> int:
    async with rpc.channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)
        return int(answer.status)


async def test_the_health_port_tells_health_in_the_clear_and_nothing_else(ours: Path) -> None:
    status = health_pb2.HealthCheckResponse
    async with target(ours, health_port=0) as server:
        address = f"127.0.0.1:{server.health_port}"
        for service in ("", "specdec.v1.TargetService"):
            assert await health(address, service) == status.SERVING
        async with rpc.channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await target_pb2_grpc.TargetServiceStub(channel).GetModelInfo(common_pb2.GetModelInfoRequest())
            assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
        await server._server.set_serving(False)
        assert await health(address) == status.NOT_SERVING
    with pytest.raises(grpc.aio.AioRpcError):
        await health(address)


async def test_the_orchestrator_has_a_health_port_too(ours: Path) -> None:
    async with cluster([LmVerifier(runner())], (), ours, health_port=0) as running:
        port = running.orchestrator.health_port
        assert await health(f"127.0.0.1:{port}") == health_pb2.HealthCheckResponse.SERVING


# --- rotation -----------------------------------------------------------------------------------------------


async def test_rotation_under_load_loses_nothing(own: Path) -> None:
    """New certificates, then a new CA: streams go on, new connections take the new files, and no request fails."""
    drafters = [LanguageModelDrafter(runner(blend=(2, 0.3)))]
    async with cluster([LmVerifier(runner()), LmVerifier(runner())], drafters, own) as running:
        [expected] = await running.client.generate(**REQUEST)
        addresses = [replica.address for replica in running.orchestrator.targets.replicas]
        served = 0

        async def load() -> None:
            nonlocal served
            while not done:
                # A connection of its own each time: the client's side of a rotation.
                async with Client(f"127.0.0.1:{running.orchestrator.port}", tls=stranger(own)) as client:
                    [sample] = await client.generate(**REQUEST)
                assert sample.token_ids == expected.token_ids
                assert sample.finish.speculation.num_replays == 0
                served += 1

        async def some(count: int) -> None:
            enough = served + count
            async with asyncio.timeout(PATIENCE_S):
                while served < enough:
                    if failed := [each for each in workers if each.done()]:
                        await failed[0]
                    await asyncio.sleep(0.01)

        done = False
        workers = [asyncio.create_task(load()) for _ in range(4)]
        try:
            await some(8)
            certificates.make(own)
            await some(8)
            assert await verify(addresses[0], caller(own, "orchestrator")) == 3

            # Another CA: everybody trusts both, then takes a certificate of the new one, then forgets the old one.
            old = (own / "ca" / certificates.CERT).read_bytes()
            spare = own / "spare"
            certificates.make(spare)
            new = (spare / "ca" / certificates.CERT).read_bytes()
            for contents, certs in ((old + new, False), (old + new, True), (new, True)):
                for owner in certificates.OWNERS:
                    (own / owner / certificates.CA).write_bytes(contents)
                    if certs:
                        for name in (certificates.CERT, certificates.KEY):
                            (own / owner / name).write_bytes((spare / owner / name).read_bytes())
                await some(8)
            assert await verify(addresses[1], caller(spare, "orchestrator")) == 3
        finally:
            done = True
            await asyncio.gather(*workers)
        assert all(replica.ready for replica in running.orchestrator.targets.replicas)
        await running.settled()


async def test_an_orchestrator_with_a_bad_certificate_gets_in_once_it_has_a_good_one(own: Path, theirs: Path) -> None:
    """A channel keeps the certificate that it was made with; waiting for a target it must not."""
    async with target(own) as server:
        mine = own / "orchestrator"
        for name in (certificates.CERT, certificates.KEY):
            (mine / name).write_bytes((theirs / "orchestrator" / name).read_bytes())
        orchestrator = OrchestratorServer(
            OrchestratorSettings(target=[f"127.0.0.1:{server.port}"], **files(own, "orchestrator"))
        )
        await orchestrator.start()
        try:
            [replica] = orchestrator.targets.replicas
            async with asyncio.timeout(PATIENCE_S):
                while "it trusts another CA" not in replica.problem:
                    await asyncio.sleep(0.01)
                certificates.make(own)
                while not replica.ready:
                    await asyncio.sleep(0.01)
        finally:
            await orchestrator.stop()
