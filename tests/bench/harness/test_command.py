"""A benchmark that is told to end leaves no service behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("bench.chaos", "specdec chaos"),
        ("bench.gateway", "specdec bench gateway"),
        ("bench.never_slower", "specdec bench never-slower"),
    ],
)
def test_help_names_the_command_as_it_is_typed(module, command):
    shown = subprocess.run([sys.executable, "-m", module, "--help"], capture_output=True, text=True, check=True).stdout
    assert f"Usage: {command} [OPTIONS]" in shown


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.parametrize("command", [["bench.load"], ["bench.chaos", "1"]], ids=" ".join)
def test_sigterm_ends_its_services_too(command, tmp_path):
    with open(tmp_path / "log", "w") as log:
        benchmark = subprocess.Popen([sys.executable, "-m", *command], stdout=log, stderr=log)
    services: list[int] = []
    try:
        while len(services) < 3:
            assert benchmark.poll() is None, (tmp_path / "log").read_text()
            services = children(benchmark.pid)
            time.sleep(0.02)
        benchmark.send_signal(signal.SIGTERM)
        assert benchmark.wait(60) != 0
    finally:
        benchmark.kill()
        left = [pid for pid in services if Path(f"/proc/{pid}").exists()]
        for pid in left:
            os.kill(pid, signal.SIGKILL)
    assert not left, (tmp_path / "log").read_text()
