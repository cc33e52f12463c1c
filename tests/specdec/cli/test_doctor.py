"""What `specdec doctor` says of deployments that are well, and of those that are not."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from draft_service.server import create_server as create_draft_server
from orchestrator.api.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec.cli import doctor_report
from specdec.cli.doctor import Finding, Visit, examine, findings
from specdec.cli.processes import free_ports
from specdec.core.rounds import ModelInfo
from specdec.core.settings import EngineSettings, ServiceSettings
from specdec.transport import rpc
from specdec.v1 import common_pb2, generation_pb2, target_pb2_grpc
from target_service.codec import TargetCodec
from target_service.engine import TargetEngine
from target_service.server import TargetServicer
from target_service.server import create_server as create_target_server
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.cluster import cluster
from tests.specdec.cli.commands import called

TABLE = Table(vocab_size=64, context_length=512)


def visit(role: str, address: str, keepalive_ms: int = 2000, min_ping_interval_ms: int = 1000, **fields: Any) -> Visit:
    """What a service without trouble says."""
    keepalive = common_pb2.Keepalive(keepalive_ms=keepalive_ms, min_ping_interval_ms=min_ping_interval_ms)
    info = None if role == "orchestrator" else ModelInfo("m", "d1", 64, "f", 99)
    return Visit(role, address, keepalive=keepalive, info=info, **fields)


def wrong(listed: list[Finding]) -> list[str]:
    return [item.what for item in listed if item.wrong]


def rendered(visits: list[Visit]) -> str:
    return "\n".join(doctor_report.lines(visits, []))


async def test_a_healthy_deployment_has_no_findings() -> None:
    async with cluster([TableVerifier(TABLE), TableVerifier(TABLE)], [TableDrafter(TABLE)]) as running:
        visits, listed = await examine(f"127.0.0.1:{running.orchestrator.port}")
    assert listed == []
    assert [entry.role for entry in visits] == ["orchestrator", "target", "target", "draft"], "those it names, too"
    assert all(entry.round_trip_ms > 0 and entry.serving for entry in visits)
    assert all(entry.keepalive == rpc.keepalive() for entry in visits)
    shown = rendered(visits)
    for text in ("table-target", "table-draft", "64 table", "512", "float32", "0/1048576", " ms"):
        assert text in shown
    assert json.loads(json.dumps(doctor_report.as_dict(visits, listed)))["ok"] is True


async def test_a_difference_between_services_is_named_on_both_sides() -> None:
    """A draft of another vocabulary with a shorter context, and a target of another digest."""
    settings = EngineSettings()
    other = Table(vocab_size=32, context_length=256)
    servers = [
        create_target_server(TableVerifier(TABLE), settings),
        create_target_server(TableVerifier(Table(64, acceptance=0.1, context_length=512)), settings),
        create_draft_server(TableDrafter(other), settings),
    ]
    async with AsyncExitStack() as stack:
        for server in servers:
            await server.start()
            stack.push_async_callback(server.stop)
        one, two, draft = [f"127.0.0.1:{server.port}" for server in servers]
        orchestrator = OrchestratorServer(OrchestratorSettings(target=[one], draft=[draft]))
        await orchestrator.start()
        stack.push_async_callback(orchestrator.stop)
        async with asyncio.timeout(10):  # until it has refused the draft
            while "vocabulary" not in orchestrator.drafts.replicas[0].problem:
                await asyncio.sleep(0.01)
        visits, listed = await examine(f"127.0.0.1:{orchestrator.port}", targets=[two, one])
    assert sorted((entry.role, entry.address) for entry in visits[1:]) == sorted(
        [("target", one), ("target", two), ("draft", draft)]
    ), "each is visited once"
    said = wrong(listed)
    [refused] = [what for what in said if "does not use" in what]
    assert draft in refused
    [digests] = [what for what in said if "different models" in what]
    assert all(part in digests for part in ("table-target", one, two))
    vocabularies = [what for what in said if "cannot draw" in what]
    assert len(vocabularies) == 2
    assert all(draft in what and "of 32 tokens" in what and "of 64" in what for what in vocabularies)
    wrong_contexts = {item.wrong for item in listed if "context of 256" in item.what}
    assert wrong_contexts == {False}, "it works, for shorter texts"
    assert all(item.remedy for item in listed)
    assert doctor_report.as_dict(visits, listed)["ok"] is False


async def test_a_service_that_does_not_answer_is_a_finding() -> None:
    closed, also_closed = [f"127.0.0.1:{port}" for port in free_ports(2)]
    async with cluster([TableVerifier(TABLE)]) as running:
        target = f"127.0.0.1:{running.targets[0].port}"
        visits, listed = await examine(closed, targets=[target], drafts=[target, also_closed])
    first, second, third = wrong(listed)
    assert closed in first
    assert "cannot be reached" in first
    assert {True} == {any(part in what for what in (second, third)) for part in (also_closed, "it is no draft")}
    assert rendered(visits).count("no answer") == 3
    assert [entry.info is not None for entry in visits if entry.address == target and entry.role == "target"] == [True]


async def test_a_service_that_does_not_serve_is_a_finding() -> None:
    verifier = TableVerifier(TABLE)
    servicer = TargetServicer(TargetEngine(verifier), TargetCodec(verifier.info), verifier.info, "target")
    server = rpc.Server(ServiceSettings(), ["a service"])  # says NOT_SERVING until it is told to serve
    target_pb2_grpc.add_TargetServiceServicer_to_server(servicer, server.grpc)
    await server.start()
    _, listed = await examine("127.0.0.1:1", targets=[f"127.0.0.1:{server.port}"])
    await server.stop()
    assert any("not serving" in what and "target" in what for what in wrong(listed))


def test_more_pings_than_are_allowed_are_foretold_with_what_comes_of_them() -> None:
    places = (("target", "t:1"), ("draft", "d:1"))
    named = [generation_pb2.Replica(role=role, address=address, ready=True) for role, address in places]
    well = [visit("orchestrator", "o:1", replicas=named), visit("target", "t:1"), visit("draft", "d:1")]
    assert list(findings(well)) == []
    strict = [well[0], visit("target", "t:1", min_ping_interval_ms=300_000), well[2]]
    [what] = wrong(list(findings(strict)))
    for part in ("orchestrator o:1", "2000 ms", "target t:1", "300000 ms", "too many pings", "all calls"):
        assert part in what
    strict_itself = [visit("orchestrator", "o:1", min_ping_interval_ms=5000, replicas=named), *well[1:]]
    [what] = wrong(list(findings(strict_itself)))
    assert "this command" in what
    [old] = findings([well[0], visit("target", "t:1", 0, 0), well[2]])
    assert (old.wrong, "older" in old.remedy) == (False, True)


def test_without_targets_nothing_works_and_without_drafts_it_is_only_slower() -> None:
    no_target, no_draft = findings([visit("orchestrator", "o:1")])
    assert (no_target.wrong, "no target" in no_target.what) == (True, True)
    assert (no_draft.wrong, "works alone" in no_draft.what) == (False, True)


async def test_the_command_exits_with_0_where_all_is_well_and_else_with_1_and_words() -> None:
    async with cluster([TableVerifier(TABLE)], [TableDrafter(TABLE)]) as running:
        status, out, _ = await called("doctor", f"--address=127.0.0.1:{running.orchestrator.port}")
    assert (status, "All is well." in out) == (0, True)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    status, out, _ = await called("doctor", f"--address={address}", f"--target={address}")
    assert status == 1
    assert all(words in out for words in ("cannot be reached", "WRONG", "To do: start it"))
    status, out, _ = await called("doctor", f"--address={address}", "--json")
    assert (status, json.loads(out)["ok"]) == (1, False)


async def test_a_report_fits_into_80_columns_and_keeps_names_whole() -> None:
    name = "/models/a-directory-with-a-name-that-is-long/of-a-checkpoint-that-is-not-short/target"
    model = visit("target", "a-rather-long-name-of-a-service.specdec.svc.cluster.local:50051")
    assert model.info is not None
    model.info = replace(model.info, name=name, model_digest="d" * 64, tokenizer_fingerprint="f" * 64)
    visits = [visit("orchestrator", "o:1"), model]
    shown = list(doctor_report.lines(visits, list(findings(visits))))
    assert not [line for line in shown if len(line) > 80 and name not in line]
    for text in (model.address, name, "d" * 12, "f" * 8, "serving"):
        assert any(text in line for line in shown)


def test_the_engine_of_a_target_and_the_chains_that_it_verifies_are_shown() -> None:
    engine, chains = visit("target", "a:1"), visit("target", "b:1")
    assert engine.info is not None
    assert chains.info is not None
    engine.info, chains.info = (
        replace(engine.info, backend="torch"),
        replace(chains.info, backend="vllm", max_chain=8),
    )
    assert "vllm, chains of 8" in rendered([chains])
    assert "chains" not in rendered([engine])
    report = doctor_report.as_dict([engine, chains], [])["services"]
    assert [(entry["backend"], entry["max_chain"]) for entry in report] == [("torch", 0), ("vllm", 8)]


async def test_a_proxy_in_the_way_of_other_clients_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("grpc_proxy", "https_proxy", "no_proxy", "no_grpc_proxy"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_ports(1)[0]}")
    async with cluster([TableVerifier(TABLE)], [TableDrafter(TABLE)]) as running:
        address = f"127.0.0.1:{running.orchestrator.port}"
        [listed] = (await examine(address))[1]
        assert (listed.wrong, "http_proxy" in listed.what, "no_proxy" in listed.remedy) == (
            False,
            True,
            True,
        )
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        assert (await examine(address))[1] == []


async def test_a_proxy_named_for_grpc_is_part_of_the_remedy_of_a_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    closed, proxy = free_ports(2)
    monkeypatch.setenv("grpc_proxy", f"http://127.0.0.1:{proxy}")
    silent = (await examine(f"127.0.0.1:{closed}"))[1][0]
    assert "grpc_proxy" in silent.remedy


async def test_to_an_ordinary_key_a_healthy_deployment_has_no_fault(tmp_path) -> None:
    """It is not told where replicas are, and that is said instead of a fault that there is not."""
    _, line, token = await called("key", "alice")
    file = tmp_path / "keys"
    file.write_text(line)
    async with cluster([TableVerifier(TABLE)], [TableDrafter(TABLE)], api_keys_file=str(file)) as running:
        _, listed = await examine(f"127.0.0.1:{running.orchestrator.port}", api_key=token.strip())
    assert [item.what for item in listed] == ["this API key does not show where the replicas are"]
    assert not wrong(listed)
