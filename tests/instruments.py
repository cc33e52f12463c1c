"""What instruments say, in a form that is easily compared."""

from __future__ import annotations

from opentelemetry.sdk.metrics.export import InMemoryMetricReader


def total(reader: InMemoryMetricReader) -> dict[str, dict[tuple, float]]:
    """Per instrument and attributes: the sum (a histogram's count)."""
    data = reader.get_metrics_data()
    return {
        metric.name: {
            tuple(sorted(point.attributes.items())): getattr(point, "value", None) or getattr(point, "count", 0)
            for point in metric.data.data_points
        }
        for resource in data.resource_metrics
        for scope in resource.scope_metrics
        for metric in scope.metrics
    }
