"""Examples may take as long as a busy machine needs. In CI they are always the same, at a desk always new ones."""

import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from specdec.server.process import let_threads_sleep

let_threads_sleep()  # two threads that spin on a shared core take ten times as long

settings.register_profile(
    "patient",
    settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))),
)
settings.load_profile("patient")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--device", default="cpu", help="where tests/parity runs the bundled models: cpu, cuda, cuda:1, ..."
    )
    parser.addoption("--backend", help="the backend of all tests that name none, as SPECDEC_BACKEND sets it")


def pytest_configure(config: pytest.Config) -> None:
    # Triton reads this when it is imported, by torch too. vLLM has kernels of its own for CPUs.
    if not torch.cuda.is_available() and find_spec("vllm") is None:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    if config.getoption("--backend"):
        os.environ["SPECDEC_BACKEND"] = config.getoption("--backend")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests first: one that is begun last runs while the other core has nothing left to do."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


_STARTS = ("subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty")


@pytest.fixture(scope="session")
def started() -> list[str]:
    """What starts processes, from now on. An audit hook cannot be removed, so there is one for all tests."""
    events: list[str] = []
    sys.addaudithook(lambda event, details: events.append(f"{event} {details}") if event in _STARTS else None)
    return events


@pytest.fixture(autouse=True)
def no_processes(request: pytest.FixtureRequest, started: list[str]) -> Iterator[None]:
    """Only tests that are marked as slow start processes; `make test-fast` leaves those out."""
    started.clear()
    yield
    assert not started or request.node.get_closest_marker("slow"), f"needs the marker `slow`: {started[0]}"


@pytest.fixture
def measured(monkeypatch) -> InMemoryMetricReader:
    """What all instruments made from now on say; see tests.instruments."""
    reader = InMemoryMetricReader()
    monkeypatch.setattr(metrics, "get_meter", MeterProvider([reader]).get_meter)
    return reader
