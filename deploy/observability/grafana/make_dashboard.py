"""The dashboard as code: ``python -m deploy.observability.grafana.make_dashboard`` writes dashboards/specdec.json.

Knows Grafana's format; does not know what is shown (deploy.observability.grafana.rows).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from deploy.observability.grafana.rows import ROWS, Panel

FILE = Path(__file__).with_name("dashboards") / "specdec.json"
WIDTH = 24
HEIGHT = 8


_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_PROMETHEUS = {"text": "Prometheus", "value": "prometheus"}
_DATASOURCE = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
_NAMESPACES = {"name": "namespace", "label": "Namespace", "type": "query", "datasource": _SOURCE, "refresh": 2}
_NAMESPACES |= {"query": "label_values(specdec_live_sequences, namespace)", "multi": True, "includeAll": True}
# All includes compose, where the series lack this label.
_NAMESPACES |= {"allValue": ".*", "current": {"text": "All", "value": "$__all"}}
_METRIC = re.compile(r"\b((?:specdec_|vllm:|gen_ai_|process_)[\w:]+)(?:\{([^}]*)\})?")


def within(expression: str) -> str:
    """The same query, restricted to the selected namespaces."""

    def narrowed(found: re.Match[str]) -> str:
        name, labels = found.groups()
        return f'{name}{{{labels + ", " if labels else ""}namespace=~"$namespace"}}'

    return _METRIC.sub(narrowed, expression)


def dashboard() -> dict[str, Any]:
    panels: list[dict[str, Any]] = []
    top = 0
    for title, row in ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": top, "w": WIDTH, "h": 1}, "panels": []})
        left = 0
        for panel in row:
            panels.append(_panel(panel, left, top + 1))
            left += panel.width
        top += 1 + HEIGHT
    for number, each in enumerate(panels, 1):
        each["id"] = number
    return {
        "uid": "specdec",
        "title": "specdec",
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "timezone": "utc",
        "tags": ["specdec"],
        "templating": {"list": [{**_DATASOURCE, "current": _PROMETHEUS}, _NAMESPACES]},
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel(panel: Panel, left: int, top: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0, "custom": {}}
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        defaults["custom"] = {"fillOpacity": 40 if panel.stacked else 0, "stacking": stacking, "lineWidth": 1}
    if panel.kind == "stat":
        steps = [{"color": "red", "value": None}, {"color": "yellow", "value": 0.98}, {"color": "green", "value": 1.05}]
        defaults |= {"thresholds": {"mode": "absolute", "steps": steps}, "decimals": 2}
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.why,
        "datasource": _SOURCE,
        "gridPos": {"x": left, "y": top, "w": panel.width, "h": HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {
                "refId": chr(ord("A") + number),
                "datasource": _SOURCE,
                "expr": within(query.expression),
                "legendFormat": query.legend,
            }
            for number, query in enumerate(panel.queries)
        ],
    }


def text() -> str:
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
