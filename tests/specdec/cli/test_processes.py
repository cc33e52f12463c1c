"""How services are started as processes: in what environment."""

from __future__ import annotations

import subprocess
import sys

import grpc
import pytest

from specdec.cli.processes import environment


@pytest.fixture(autouse=True)
def unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)


def said_by_grpc(experiments: str) -> str:
    command = [sys.executable, "-c", "import grpc; grpc.insecure_channel('localhost:1').close()"]
    ended = subprocess.run(
        command, env=environment() | {"GRPC_EXPERIMENTS": experiments}, capture_output=True, text=True, check=True
    )
    return ended.stderr


@pytest.mark.slow
def test_grpc_knows_the_experiments_that_services_are_started_with():
    experiments = environment()["GRPC_EXPERIMENTS"]
    assert "Unknown experiment" not in said_by_grpc(experiments)
    assert "Unknown experiment: nonsense" in said_by_grpc(f"{experiments},nonsense")


def test_the_environments_own_experiments_win(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("GRPC_EXPERIMENTS", "monitoring_experiment")
    assert environment()["GRPC_EXPERIMENTS"] == "monitoring_experiment"


def test_of_a_release_that_nobody_tried_nothing_is_asked(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grpc, "__version__", "1.99.0")
    assert "GRPC_EXPERIMENTS" not in environment()
