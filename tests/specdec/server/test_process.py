"""A process that serves keeps the garbage collector away from what stays, and lets the threads of a pass sleep."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
import weakref

import pytest

from specdec.server.process import freeze_garbage, let_threads_sleep


class Thing:
    """Something that can be in a cycle."""


def test_what_is_there_is_not_looked_at_again_and_what_comes_later_is():
    gc.unfreeze()
    garbage = Thing()
    garbage.itself = garbage
    gone = weakref.ref(garbage)
    del garbage
    try:
        freeze_garbage()
        assert gone() is None, "garbage would stay for ever"
        num_settled = gc.get_freeze_count()
        assert num_settled > 1000
        later = Thing()
        later.itself = later
        gone = weakref.ref(later)
        del later
        gc.collect()
        assert gone() is None
    finally:
        gc.unfreeze()


@pytest.mark.slow
@pytest.mark.skipif(platform.system() != "Linux", reason="GNU's OpenMP is torch's on Linux alone")
def test_a_services_threads_sleep_soon():
    """By what libgomp says of itself, in a target service that loads torch and then finds no model."""
    unset = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    ended = subprocess.run(
        [sys.executable, "-m", "target_service", "--model=/nowhere"],
        env={**environment, "OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ended.returncode == 2, ended.stderr
    assert "GOMP_SPINCOUNT = '10000'" in ended.stderr


@pytest.mark.parametrize(
    ("name", "value", "spins"), [("GOMP_SPINCOUNT", "77", "77"), ("OMP_WAIT_POLICY", "passive", None)]
)
def test_the_environment_may_say_otherwise(monkeypatch: pytest.MonkeyPatch, name: str, value: str, spins: str | None):
    for each in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, value)
    let_threads_sleep()
    assert os.environ.get("GOMP_SPINCOUNT") == spins
