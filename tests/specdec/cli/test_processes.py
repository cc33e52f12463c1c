"""Services as processes: in what environment they start, how long they are waited for, and what becomes of them."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import grpc
import pytest
from rich.console import Console

from specdec.cli import processes, up
from specdec.cli.processes import Service, StartError, environment, free_ports, healthy, paired, service
from specdec.client import Client
from specdec.security import dev_ca
from testing.table_model import Table, TableDrafter, TableVerifier
from tests.checkout import ROOT
from tests.cluster import cluster
from tests.specdec.cli.commands import TERMINAL, called

PATIENCE_S = 60.0


@pytest.mark.slow
def test_grpc_knows_the_experiments_that_services_are_started_with(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    command = [sys.executable, "-c", "import grpc; grpc.insecure_channel('localhost:1').close()"]
    variables = environment()
    variables["GRPC_EXPERIMENTS"] += ",nonsense"
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert re.findall(r"Unknown experiment: ([\w-]+)", ended.stderr) == ["nonsense"]


def test_experiments_are_asked_for_where_the_release_is_known_and_the_environment_names_none(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("GRPC_EXPERIMENTS", "monitoring_experiment")
    assert environment()["GRPC_EXPERIMENTS"] == "monitoring_experiment"
    monkeypatch.delenv("GRPC_EXPERIMENTS")
    monkeypatch.setattr(grpc, "__version__", "1.99.0")
    assert "GRPC_EXPERIMENTS" not in environment()


async def test_a_wait_is_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt takes time, too: the wait for a service that does not answer once took ten times as long."""
    num_attempts = 0

    async def slow(*_: Any, **__: Any) -> bool:
        nonlocal num_attempts
        num_attempts += 1
        await asyncio.sleep(0.15)
        return False

    monkeypatch.setattr(processes, "is_serving", slow)
    log: Any = SimpleNamespace(name=os.devnull)
    running: Any = SimpleNamespace(returncode=None)
    with pytest.raises(StartError, match=r"target was not healthy after 0.3 s"):
        await healthy(Service("target", "127.0.0.1:1", [], log, False, running), 0.3)
    assert num_attempts <= 2


async def test_a_wait_names_the_service_and_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_FIRST_WORD_S", 0.05)
    monkeypatch.setattr(processes, "is_serving", AsyncMock(return_value=False))
    said: list[str] = []
    [port] = free_ports(1)
    log: Any = SimpleNamespace(name=os.devnull)
    running: Any = SimpleNamespace(returncode=None)
    with pytest.raises(StartError):
        await healthy(Service("target_service", f"127.0.0.1:{port}", [], log, False, running), 0.5, said.append)
    assert said
    assert all(
        f"target_service does not serve yet at 127.0.0.1:{port}; its log is {os.devnull}" in message for message in said
    )
    assert len(said) < 5, "each pause is longer than the one before"


async def test_a_wait_for_a_replica_says_why_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_FIRST_WORD_S", 0.05)
    said: list[str] = []
    async with cluster([TableVerifier(Table())], [TableDrafter(Table())]) as running:
        await running.drafts[0].stop()
        log: Any = SimpleNamespace(name=os.devnull)
        front: Any = SimpleNamespace(address=f"127.0.0.1:{running.orchestrator.port}", tls=None, log=log)
        with pytest.raises(StartError, match="does not use all replicas"):
            await paired(front, 2.0, said.append)
    assert any(f"draft 127.0.0.1:{running.drafts[0].port}" in message for message in said)


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def children(pid: int) -> list[int]:
    return [int(message) for message in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


# Also where these tests run under nohup, which a program is to heed. Not by a preexec_fn: that forks a process with
# threads of gRPC, which may end the child.
HEEDS_SIGHUP = """
import os, signal, sys
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """``specdec up``."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", HEEDS_SIGHUP, "-m", "specdec.cli.main", "up", *arguments),
        env=os.environ | TERMINAL,
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
async def test_a_signal_during_the_start_leaves_no_process_behind(number: signal.Signals, tmp_path: Path) -> None:
    async with started(f"--logs={tmp_path}") as process, asyncio.timeout(PATIENCE_S):
        while len(mine := children(process.pid)) < 3:
            await asyncio.sleep(0.02)
        process.send_signal(number)
        assert await process.wait() == 0
    assert not [pid for pid in mine if alive(pid)]
    assert sorted(os.listdir(tmp_path)) == ["draft_service.log", "orchestrator.log", "target_service.log"]


@pytest.mark.slow
async def test_the_three_processes_serve_over_tls_and_one_that_dies_ends_all_and_is_named(tmp_path: Path) -> None:
    """The bundled pair, from start to text. The report of the end has the status and the log."""
    dev_ca.make(tmp_path / "pki")
    (tmp_path / "logs").mkdir()
    [port] = free_ports(1)
    flags = (f"--port={port}", "--threads=1", f"--certificates={tmp_path / 'pki'}", f"--logs={tmp_path / 'logs'}")
    async with started(*flags) as process, asyncio.timeout(PATIENCE_S):
        assert process.stdout is not None
        said = ""
        while "Ready:" not in said:
            line = (await process.stdout.readline()).decode()
            assert line, said
            said += line
        request = ("generate", "def main(", "--max-tokens=8", "--seed=1", f"--address=127.0.0.1:{port}")
        status, text, err = await called(*request, f"--tls-ca={tmp_path / 'pki/operator/ca.crt'}")
        assert (status, err) == (0, "")
        assert len(text) > 8
        assert (await called(*request))[0] == 1, "in the clear"
        mine = children(process.pid)
        [draft] = [pid for pid in mine if "draft_service" in command_of(pid)]
        os.kill(draft, signal.SIGKILL)
        rest = (await process.stdout.read()).decode()
        assert await process.wait() == 1
    assert f"specdec: draft_service ended by SIGKILL; its log is {tmp_path}/logs/draft_service.log" in rest
    assert not [pid for pid in mine if alive(pid)]


@pytest.mark.slow
async def test_without_a_draft_the_target_serves_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SPECDEC_DRAFT", "127.0.0.1:1")  # of other services than these
    [port] = free_ports(1)
    flags = ("--no-draft", f"--port={port}", "--http-port=0", f"--logs={tmp_path}")
    async with started(*flags) as process, asyncio.timeout(PATIENCE_S):
        assert process.stdout is not None
        while b"Ready:" not in (line := await process.stdout.readline()):
            assert line
        assert len(children(process.pid)) == 2
        async with Client(f"127.0.0.1:{port}") as client:
            assert [replica.role for replica in (await client.server_info()).replicas] == ["target"]
            [sample] = await client.generate(text="one two three " * 8, max_tokens=64, temperature=0.0)
    assert len(sample.token_ids) == 64


def without_processes(monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """Nothing is started. What each service would be told comes into the result, by module."""
    flags_of: dict[str, list[str]] = {}

    @asynccontextmanager
    async def recorded(module: str, port: int, arguments: Sequence[str], logs: Path | None) -> AsyncIterator[Any]:
        flags_of[module] = list(arguments)
        yield SimpleNamespace()

    async def at_once(*_: Any) -> None:
        pass

    monkeypatch.setattr(processes, "service", recorded)
    monkeypatch.setattr(processes, "_can_generate", at_once)
    return flags_of


async def test_every_service_is_told_the_revision_of_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer of another commit than the target's may have other ids."""
    flags_of = without_processes(monkeypatch)
    async with processes.deployment("someone/large", "someone/small", revisions={"target": "v1", "draft": "v2"}):
        revisions = {module: [flag for flag in flags if "revision" in flag] for module, flags in flags_of.items()}
        assert revisions == {
            "target_service": ["--revision=v1"],
            "draft_service": ["--revision=v2"],
            "orchestrator": ["--revision=v1"],
        }


async def test_a_draft_that_is_a_file_is_an_ngram_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    flags_of = without_processes(monkeypatch)
    (tmp_path / "counted").touch()
    for draft, flag in ((tmp_path / "counted", "--ngram"), (tmp_path, "--model")):
        async with processes.deployment("someone/large", str(draft), arguments=["--threads=1"]):
            assert flags_of["draft_service"] == [f"{flag}={draft}", "--revision=", "--threads=1"]
            assert flags_of["target_service"][0] == "--model=someone/large"


@pytest.mark.slow
async def test_logs_where_there_can_be_none_are_refused_in_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    async with started(f"--logs={tmp_path / 'file' / 'logs'}") as process, asyncio.timeout(PATIENCE_S):
        assert process.stdout is not None
        said = (await process.stdout.read()).decode()
        assert await process.wait() == 1
    assert said.startswith(f"specdec: no log can be written in {tmp_path / 'file' / 'logs'}: ")


@pytest.mark.slow
async def test_a_service_that_gives_itself_up_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(up, "_PAUSE_S", 0.0)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "gives_up_twice.py").write_text(
        f"import pathlib, sys; file = pathlib.Path({str(tmp_path / 'count')!r}); file.open('a').write('x')\n"
        "sys.exit(3 if len(file.read_text()) < 3 else 5)"
    )
    (tmp_path / "waits.py").write_text("import time; time.sleep(100)")

    @asynccontextmanager
    async def deployment(*_: Any, **options: Any) -> AsyncIterator[Sequence[Service]]:
        async with AsyncExitStack() as stack:
            modules = ("gives_up_twice", "waits", "waits")
            yield [await stack.enter_async_context(service(module, 1, [], tmp_path)) for module in modules]

    monkeypatch.setattr(up, "deployment", deployment)
    console = Console(record=True, width=300)
    with pytest.raises(StartError, match="ended with status 5; its log is "):
        await asyncio.wait_for(up.run(console, "t", "d", logs=tmp_path), PATIENCE_S)
    assert (tmp_path / "count").read_text() == "xxx"
    assert console.export_text().count("gives_up_twice ended with status 3") == 2


@pytest.mark.parametrize(
    ("lines", "shown"),
    [
        (["a", "b", "c"], "b\nc"),
        (["a", "specdec target: no such model", "leaked 1", "leaked 2"], "specdec target: no such model\nleaked 1"),
        ([], ""),
    ],
)
def test_the_end_of_a_log_begins_with_what_the_service_refused(lines: list[str], shown: str, tmp_path: Path) -> None:
    """Libraries write after it, as nanobind does of what has leaked."""
    log, running = cast(Any, SimpleNamespace(name=tmp_path / "log")), cast(Any, None)
    log.name.write_text("".join(f"{line}\n" for line in lines))
    assert Service("target_service", "127.0.0.1:1", [], log, True, running).log_tail(2) == shown
