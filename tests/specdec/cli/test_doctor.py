"""What `specdec doctor` says of deployments that are well, and of those that are not."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from bench.models.table_model import Table, TableDrafter, TableVerifier
from draft_service.server import create_server as create_draft_server
from orchestrator.api.server import OrchestratorServer
from orchestrator.settings import OrchestratorSettings
from specdec.cli import doctor
from specdec.cli.doctor import Finding, Visit, examine, findings
from specdec.cli.main import app
from specdec.cli.processes import free_ports
from specdec.core.rounds import ModelInfo
from specdec.core.settings import EngineSettings
from specdec.transport import rpc
from specdec.v1 import common_pb2, generation_pb2
from target_service.server import create_server as create_target_server
from tests.cluster import cluster

TABLE = Table(vocab_size=64, context_length=512)


def model(**fields: Any) -> ModelInfo:
    return ModelInfo(
        **{
            "name": "m",
            "model_digest": "d1",
            "vocab_size": 64,
            "tokenizer_fingerprint": "f",
            "context_length": 99,
            **fields,
        }
    )


def visit(role: str, address: str, keepalive_ms: int = 2000, min_ping_interval_ms: int = 1000, **fields: Any) -> Visit:
    keepalive = common_pb2.Keepalive(keepalive_ms=keepalive_ms, min_ping_interval_ms=min_ping_interval_ms)
    info = fields.pop("info", None) or (None if role == "orchestrator" else model())
    return Visit(role, address, keepalive=keepalive, info=info, **fields)


def replica(role: str, address: str) -> generation_pb2.Replica:
    return generation_pb2.Replica(role=role, address=address, ready=True)


def wrong(found: list[Finding]) -> list[str]:
    return [each.what for each in found if each.wrong]


def rendered(visits: list[Visit]) -> str:
    console = Console(width=200)
    with console.capture() as capture:
        console.print(doctor.table(visits))
    return capture.get()


async def test_of_a_deployment_that_is_well_nothing_is_said() -> None:
    async with cluster([TableVerifier(TABLE), TableVerifier(TABLE)], [TableDrafter(TABLE)]) as running:
        visits, found = await examine(f"127.0.0.1:{running.orchestrator.port}")
    assert found == []
    assert [each.role for each in visits] == ["orchestrator", "target", "target", "draft"], "those it names, too"
    assert all(each.round_trip_ms > 0 and each.serving for each in visits)
    assert all(each.keepalive == rpc.keepalive() for each in visits)
    shown = rendered(visits)
    for text in ("table-target", "table-draft", "64 table", "512", "float32", "0/1048576", " ms"):
        assert text in shown
    assert json.loads(json.dumps(doctor.as_dict(visits, found)))["ok"] is True


async def test_what_differs_between_the_services_is_named_on_both_sides() -> None:
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
        visits, found = await examine(f"127.0.0.1:{orchestrator.port}", targets=[two, one])
    assert sorted((each.role, each.address) for each in visits[1:]) == sorted(
        [("target", one), ("target", two), ("draft", draft)]
    ), "each is visited once"
    said = wrong(found)
    [refused] = [what for what in said if "does not use" in what]
    assert draft in refused
    [digests] = [what for what in said if "different models" in what]
    assert "table-target" in digests
    assert one in digests
    assert two in digests
    vocabularies = [what for what in said if "different vocabularies" in what]
    assert len(vocabularies) == 2
    assert all(draft in what and "32 tokens" in what and "64 tokens" in what for what in vocabularies)
    contexts = [each for each in found if "context of 256" in each.what]
    assert contexts
    assert not any(each.wrong for each in contexts), "it works, for shorter texts"
    assert all(each.remedy for each in found)
    assert doctor.as_dict(visits, found)["ok"] is False


async def test_who_does_not_answer_is_a_finding() -> None:
    nobody, nobody_either = [f"127.0.0.1:{port}" for port in free_ports(2)]
    async with cluster([TableVerifier(TABLE)]) as running:
        target = f"127.0.0.1:{running.targets[0].port}"
        visits, found = await examine(nobody, targets=[target], drafts=[target, nobody_either])
    first, second, third = wrong(found)
    assert nobody in first
    assert "cannot be reached" in first
    assert {True} == {any(part in what for what in (second, third)) for part in (nobody_either, "it is no draft")}
    assert rendered(visits).count("no answer") == 3
    assert [each.info is not None for each in visits if each.address == target and each.role == "target"] == [True]


async def test_a_draining_service_is_a_finding() -> None:
    async with cluster([TableVerifier(TABLE)], [TableDrafter(TABLE)]) as running:
        running.targets[0]._server.set_serving(False)
        _, found = await examine(f"127.0.0.1:{running.orchestrator.port}")
    assert any("not serving" in what and "target" in what for what in wrong(found))


def test_who_pings_more_often_than_is_allowed_is_told_what_will_happen() -> None:
    named = [replica("target", "t:1"), replica("draft", "d:1")]
    well = [visit("orchestrator", "o:1", replicas=named), visit("target", "t:1"), visit("draft", "d:1")]
    assert list(findings(well)) == []
    strict = [well[0], visit("target", "t:1", min_ping_interval_ms=300_000), well[2]]
    [what] = wrong(list(findings(strict)))
    for part in ("orchestrator o:1", "2000 ms", "target t:1", "300000 ms", "too many pings", "all calls"):
        assert part in what
    strict_itself = [visit("orchestrator", "o:1", min_ping_interval_ms=5000, replicas=named), *well[1:]]
    [what] = wrong(list(findings(strict_itself)))
    assert "this command" in what
    old = [well[0], visit("target", "t:1", 0, 0), well[2]]
    [finding] = findings(old)
    assert not finding.wrong
    assert "older" in finding.remedy


def test_without_targets_nothing_works_and_without_drafts_it_is_only_slower() -> None:
    found = list(findings([visit("orchestrator", "o:1")]))
    assert [each.wrong for each in found] == [True, False]
    assert "no target" in found[0].what
    assert "works alone" in found[1].what


@pytest.mark.parametrize("as_json", [True, False])
def test_the_command_exits_with_1_and_words_where_nothing_listens(as_json: bool) -> None:
    [port] = free_ports(1)
    arguments = ["doctor", "--address", f"127.0.0.1:{port}", "--target", f"127.0.0.1:{port}"]
    ran = CliRunner(env={"COLUMNS": "300", "NO_COLOR": "1"}).invoke(app, [*arguments, *["--json"] * as_json])
    assert ran.exit_code == 1
    assert "cannot be reached" in ran.output
    if as_json:
        assert json.loads(ran.output)["ok"] is False
    else:
        assert "WRONG" in ran.output
        assert "To do: start it" in ran.output


async def test_the_command_exits_with_0_where_all_is_well() -> None:
    async with cluster([TableVerifier(TABLE)], [TableDrafter(TABLE)]) as running:
        arguments = ["doctor", "--address", f"127.0.0.1:{running.orchestrator.port}"]
        ran = await asyncio.to_thread(CliRunner(env={"COLUMNS": "300"}).invoke, app, arguments)
    assert ran.exit_code == 0, ran.output
    assert "All is well." in ran.output
