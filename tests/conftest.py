"""Examples may take as long as a busy machine needs. In CI they are always the same, at a desk always new ones."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from opentelemetry import metrics
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

settings.register_profile(
    "patient",
    settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=bool(os.environ.get("CI"))),
)
settings.load_profile("patient")


TESTS = Path(__file__).parent
SLOW = [
    "parity/test_row_company.py",
    "parity/test_joint_law.py",
    "specdec/cli/test_secrets.py",
    "parity/test_greedy.py",
    "parity/test_coupled.py",
    "faults/test_chaos_short.py",
    "faults/test_drafts.py",
    "specdec/cli/test_main.py",
    "bench/peers/test_peers.py",
    "parity/test_ahead_schedules.py",
    "parity/test_marginals.py",
    "parity/test_transforms.py",
    "parity/test_bfloat16.py",
    "faults/test_collector_down.py",
    "test_stateful.py",
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Slow files first: one that is begun last runs while the other core has nothing left to do."""
    rank = {TESTS / name: number for number, name in enumerate(SLOW)}
    items.sort(key=lambda item: rank.get(item.path, len(rank)))


@pytest.fixture
def measured(monkeypatch) -> InMemoryMetricReader:
    """What all instruments made from now on say; see tests.instruments."""
    reader = InMemoryMetricReader()
    monkeypatch.setattr(metrics, "get_meter", MeterProvider([reader]).get_meter)
    return reader
