"""Draws the dashboard's panels without Grafana, with the results of their queries from a Prometheus server.

``python deploy/observability/grafana/draw_dashboard.py http://127.0.0.1:9090 --minutes 5 --output dashboard.png``.
Knows the JSON of the dashboard and Prometheus's HTTP API; does not know what the panels mean. Needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

DASHBOARD = Path(__file__).with_name("dashboards") / "specdec.json"
UNITS = {"s": (1e3, "ms"), "percentunit": (100.0, "%"), "ops": (1.0, "per second"), "none": (1.0, "")}
MOST_SERIES = 8

Series = tuple[str, list[float], list[float]]


def ask(server: str, expression: str, window: tuple[float, float], step_s: float) -> list[dict[str, Any]]:
    """The range vectors of a query over ``window``. Raises OSError or KeyError if the server does not answer it."""
    fields = {"query": expression, "start": window[0], "end": window[1], "step": step_s}
    with urllib.request.urlopen(f"{server}/api/v1/query_range?{urllib.parse.urlencode(fields)}", timeout=30) as answer:
        result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return result


def series(
    server: str, panel: dict[str, Any], window: tuple[float, float], step_s: float, rate_s: float
) -> list[Series]:
    """(legend, minutes, values) of each series in the panel."""
    scale, _ = UNITS[panel["fieldConfig"]["defaults"]["unit"]]
    found = []
    for target in panel["targets"]:
        expression = target["expr"].replace("$__rate_interval", f"{rate_s:g}s").replace("$namespace", ".*")
        for each in ask(server, expression, window, step_s):
            labels = each["metric"]
            legend = target["legendFormat"]
            for name in re.findall(r"\{\{(\w+)\}\}", legend):
                legend = legend.replace("{{" + name + "}}", labels.get(name, ""))
            values = {float(at): float(value) for at, value in each["values"]}
            if any(math.isfinite(value) for value in values.values()):
                # A value for every step, so that gaps are visible.
                ats = [window[0] + step * step_s for step in range(int((window[1] - window[0]) / step_s) + 1)]
                minutes = [(at - window[0]) / 60 for at in ats]
                found.append((legend, minutes, [scale * _at(values, at, step_s) for at in ats]))
    return found


def _at(values: dict[float, float], at: float, step_s: float) -> float:
    return next((value for when, value in values.items() if abs(when - at) < step_s / 2), math.nan)


def draw(axes: Axes, panel: dict[str, Any], shown: list[Series], minutes: float) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    _, unit = UNITS[defaults["unit"]]
    title = panel["title"] + (f" ({unit})" if unit else "")
    axes.set_title(title, fontsize=8, loc="left", wrap=True)
    if panel["type"] == "bargauge":
        names, values = [legend for legend, _, _ in shown], [_last(values) for _, _, values in shown]
        axes.barh(names, values, height=0.5)
        axes.set_xlim(0, max(values, default=1) + 0.5)
    elif defaults["custom"].get("stacking", {}).get("mode") == "normal" and shown:
        times = sorted({at for _, ats, _ in shown for at in ats})
        known = [dict(zip(ats, values, strict=True)) for _, ats, values in shown]
        stacks = [[0.0 if math.isnan(each[at]) else each[at] for at in times] for each in known]
        axes.stackplot(times, stacks, labels=[legend for legend, _, _ in shown], alpha=0.7)
    else:
        for legend, ats, values in shown[:MOST_SERIES]:
            axes.plot(ats, values, label=legend, linewidth=1)
    if panel["type"] != "bargauge":
        axes.set_xlim(0, minutes)
        axes.set_ylim(bottom=0)
        if shown:
            axes.legend(fontsize=5.5, loc="upper left", framealpha=0.6)
    if panel["type"] == "stat" and shown:
        axes.text(0.97, 0.1, f"{_last(shown[0][2]):.2f}", transform=axes.transAxes, ha="right", fontsize=20)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.tick_params(labelsize=6)
    axes.grid(alpha=0.3)


def _last(values: list[float]) -> float:
    return next(value for value in reversed(values) if math.isfinite(value))


def picture(server: str, window: tuple[float, float], step_s: float, rate_s: float) -> Figure:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    rows: list[tuple[str, list[dict[str, Any]]]] = []
    for panel in panels:
        if panel["type"] == "row":
            rows.append((panel["title"], []))
        else:
            rows[-1][1].append(panel)
    figure = pyplot.figure(figsize=(16, 2.6 * len(rows)), layout="constrained")
    parts: Any = figure.subfigures(len(rows), 1)
    for part, (title, row) in zip(parts, rows, strict=True):
        part.suptitle(f"{title}   (over minutes)", fontsize=11, fontweight="bold", x=0.01, ha="left")
        widths = [panel["gridPos"]["w"] for panel in row]
        for axes, panel in zip(part.subplots(1, len(row), width_ratios=widths, squeeze=False)[0], row, strict=True):
            shown = series(server, panel, window, step_s, rate_s)
            draw(axes, panel, shown, (window[1] - window[0]) / 60)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", help="URL of the Prometheus server")
    parser.add_argument("--minutes", type=float, default=30.0, help="length of the time range")
    parser.add_argument("--until", type=float, default=None, help="end of the time range in Unix time; default: now")
    parser.add_argument("--rate-s", type=float, default=20.0, help="window of rates in seconds: four scrapes")
    parser.add_argument("--output", default="dashboard.png", help="file to write")
    told = parser.parse_args()
    end = told.until or time.time()
    step_s = max(1.0, told.minutes * 60 / 300)
    picture(told.server, (end - told.minutes * 60, end), step_s, told.rate_s).savefig(told.output, dpi=85)


if __name__ == "__main__":
    main()
