"""The threads of a pass do not spin for long: what libgomp itself says it was told."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.system() != "Linux", reason="GNU's OpenMP is torch's on Linux alone")


def spin_count(**environment: str) -> int:
    """Of a target service that loads torch and then finds no model."""
    command = [sys.executable, "-m", "target_service", "--model=/nowhere"]
    unset = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    ended = subprocess.run(
        command,
        env={**inherited, **environment, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", ended.stderr)
    assert found, ended.stderr
    return int(found.group(1))


def test_a_services_threads_sleep_soon():
    assert spin_count() == 10_000


def test_the_environment_may_say_otherwise():
    assert spin_count(GOMP_SPINCOUNT="77") == 77
    assert spin_count(OMP_WAIT_POLICY="passive") == 0
