"""Examples may take as long as a busy machine needs. In CI they are always the same, at a desk always new ones."""

import os

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


@pytest.fixture
def measured(monkeypatch) -> InMemoryMetricReader:
    """What all instruments made from now on say; see tests.instruments."""
    reader = InMemoryMetricReader()
    monkeypatch.setattr(metrics, "get_meter", MeterProvider([reader]).get_meter)
    return reader
