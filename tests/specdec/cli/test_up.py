"""`specdec up` and what it is made of: children that end, signals while it starts, logs, names that others took."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from specdec.cli import processes, up
from specdec.cli.processes import Service, StartError, free_ports, healthy, service
from tests.specdec.cli.test_main import ROOT, run

pytestmark = pytest.mark.slow

PATIENCE_S = 60.0
DEMO = ROOT / "models" / "demo"


def alive(pid: int) -> bool:
    with suppress(ProcessLookupError):
        os.kill(pid, 0)
        return True
    return False


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


@asynccontextmanager
async def started(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "specdec.cli.main", "up", *arguments),
        env=os.environ | {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"},
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        # Also where these tests run under nohup, which a program is to heed.
        preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            await process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
async def test_a_signal_during_the_start_leaves_no_process_behind(number: signal.Signals, tmp_path: Path) -> None:
    async with started(f"--logs={tmp_path}") as process, asyncio.timeout(PATIENCE_S):
        while len(mine := children(process.pid)) < 3:
            await asyncio.sleep(0.02)
        process.send_signal(number)
        assert await process.wait() == 0
    assert not [pid for pid in mine if alive(pid)]
    assert sorted(os.listdir(tmp_path)) == ["draft_service.log", "orchestrator.log", "target_service.log"]


async def test_a_service_that_dies_ends_all_and_is_named_with_its_status_and_its_log(tmp_path: Path) -> None:
    [port] = free_ports(1)
    async with started(f"--logs={tmp_path}", f"--port={port}", "--threads=1") as process, asyncio.timeout(PATIENCE_S):
        assert process.stdout is not None
        said = ""
        while "Ready:" not in said:
            line = (await process.stdout.readline()).decode()
            assert line, said
            said += line
        mine = children(process.pid)
        [draft] = [pid for pid in mine if "draft_service" in command_of(pid)]
        os.kill(draft, signal.SIGKILL)
        rest = (await process.stdout.read()).decode()
        assert await process.wait() == 1
    assert re.search(rf"specdec: draft_service ended by SIGKILL; its log is {tmp_path}/draft_service.log", rest)
    assert not [pid for pid in mine if alive(pid)]


async def test_a_service_that_gives_itself_up_is_started_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(up, "_PAUSE_S", 0.0)

    count = tmp_path / "count"
    gives_up_twice = (
        f"import pathlib, sys; file = pathlib.Path({str(count)!r}); file.open('a').write('x')\n"
        "sys.exit(3 if len(file.read_text()) < 3 else 5)"
    )
    programs = {"target": gives_up_twice, "draft": "import time; time.sleep(100)"}

    @asynccontextmanager
    async def deployment(*_: Any) -> AsyncIterator[Sequence[Service]]:
        services = []
        for name in ("target", "draft", "draft"):
            log = (tmp_path / f"{name}.log").open("ab")
            command = [sys.executable, "-c", programs[name]]
            process = await processes._started(command, log)
            services.append(Service(name, "127.0.0.1:1", command, log, True, process))
        try:
            yield services
        finally:
            for each in services:
                await processes._stop(each.process)
                each.log.close()

    monkeypatch.setattr(up, "deployment", deployment)
    console = Console(record=True, width=300)
    with pytest.raises(StartError, match="ended with status 5; its log is "):
        await asyncio.wait_for(up.run(console, "t", "d", 0, [], None, tmp_path), PATIENCE_S)
    assert (tmp_path / "count").read_text() == "xxx"
    assert console.export_text().count("target ended with status 3") == 2


async def test_what_a_user_named_like_a_service_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "orchestrator.py").write_text("raise SystemExit('the wrong one')")
    status, out, err = await run("serve", "orchestrator", "--help", directory=tmp_path)
    assert (status, err) == (0, "")
    assert "--num-draft-tokens" in out
    assert "-P" in processes.python_command("orchestrator")


async def test_a_wait_is_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt takes time, too: a service that does not answer once took ten times as long."""

    async def slow(*_: Any, **__: Any) -> bool:
        await asyncio.sleep(0.5)
        return False

    monkeypatch.setattr(processes, "is_serving", slow)
    [port] = free_ports(1)
    async with service("bench.models.table_service target", port, []) as one, asyncio.timeout(PATIENCE_S):
        began = asyncio.get_running_loop().time()
        with pytest.raises(StartError, match=r"was not healthy after 1 s"):
            await healthy(one, 1.0)
        assert asyncio.get_running_loop().time() - began < 9.0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("generate", "x", "--max-tokens=-1"), "--max-tokens"),
        (("generate", "x", "--seed=-1"), "--seed"),
        (("generate", "x", "--max-tokens=99999999999"), "99999999999"),
        (("generate", "x", "--logit-bias=-1=2"), "ID=BIAS"),
        (("demo", "--max-tokens=0"), "--max-tokens"),
        (("up", "--certificates=/no/such"), "no certificates as `specdec certificates` makes them"),
        (("serve", "orchestrator", "--target=127.0.0.1:1", "--tokenizer=BROKEN"), "is no tokenizer.json that can be"),
        (("serve", "target", "--model=BROKEN"), "is no tokenizer.json that can be read"),
    ],
    ids=lambda value: " ".join(value[:3:2]) if isinstance(value, tuple) else "",
)
async def test_what_is_wrong_is_said_in_words(arguments: tuple[str, ...], words: str, tmp_path: Path) -> None:
    for file in (DEMO / "target").iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer.json").write_text('{"model": {"type": "nonsense"}}')
    status, _, err = await run(*(each.replace("BROKEN", str(tmp_path)) for each in arguments))
    assert status in (1, 2)
    assert words in err


async def test_a_demo_that_is_too_short_to_be_measured_says_so() -> None:
    status, out, err = await run("demo", "--max-tokens=1")
    assert (status, err) == (0, "")
    assert "not measured: too short" in out
