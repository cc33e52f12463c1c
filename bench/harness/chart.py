"""Draws charts of benchmarks. The only module that needs matplotlib (``pip install specdec[bench]``)."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from bench.harness.report import Heat, Lines, Panel

_INK, _FAINT, _GRID = "#22262b", "#7a828c", "#e6e8eb"
_COLOURS = ("#7a828c", "#a8d5c5", "#5fb397", "#2f7d64", "#d08a2e", "#1f6fb5", "#b07ab8", "#55285f", "#c0504d")
_PANEL_INCHES, _LEGEND_INCHES = 4.6, 1.7


def draw(chart: Heat | Lines, file: Path) -> None:
    """Draw a chart into a file, in the format of its suffix."""
    figure = _heat(chart) if isinstance(chart, Heat) else _lines(chart)
    figure.savefig(file, dpi=160)


def _page(width: float, height: float, title: str) -> Figure:
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.2 / width, 1 - 0.3 / height, title, fontsize=13, fontweight="bold", color=_INK, va="center")
    return figure


def _heat(chart: Heat) -> Figure:
    contenders = list(chart.speeds)
    cases = list(dict.fromkeys(case for of_contender in chart.speeds.values() for case in of_contender))
    left = 0.4 + 0.075 * max(map(len, contenders))
    width, height = max(left + 0.2 + 1.15 * len(cases), 0.4 + 0.115 * len(chart.title)), 1.4 + 0.55 * len(contenders)
    figure = _page(width, height, chart.title)
    area = (left / width, 0.1 / height, (width - left - 0.1) / width, (height - 1.3) / height)
    axes = figure.add_axes(area)
    speeds = [[chart.speeds[name].get(case, math.nan) for case in cases] for name in contenders]
    axes.imshow(speeds, cmap="RdBu", norm=TwoSlopeNorm(1.0, 0.4, 2.0), aspect="auto")
    middle: dict[str, Any] = {"ha": "center", "va": "center"}
    for row, name in enumerate(contenders):
        for column, case in enumerate(cases):
            if (speed := chart.speeds[name].get(case)) is None:
                continue
            ink = "white" if speed > 1.6 or speed < 0.6 else _INK
            axes.text(column, row - 0.14, f"{speed:.2f} x", color=ink, fontsize=10, fontweight="bold", **middle)
            axes.text(column, row + 0.24, chart.notes[name][case], color=ink, fontsize=7, **middle)
    labels = [case.replace("_", " ").replace(" ", "\n", 1) for case in cases]
    axes.set_xticks(range(len(cases)), labels, fontsize=9, color=_INK)
    axes.set_yticks(range(len(contenders)), contenders, fontsize=9, color=_INK)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


def _lines(chart: Lines) -> Figure:
    columns = min(2, len(chart.panels))
    rows = math.ceil(len(chart.panels) / columns)
    width, height = _PANEL_INCHES * columns + _LEGEND_INCHES, 0.6 + 3.7 * rows
    figure = _page(width, height, chart.title)
    names = list(dict.fromkeys(name for panel in chart.panels for name in panel.lines))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    for index, panel in enumerate(chart.panels):
        left = _PANEL_INCHES * (index % columns) + 0.55
        bottom = height - 0.6 - 3.7 * (index // columns) - 3.3
        axes = figure.add_axes((left / width, bottom / height, 3.7 / width, 2.9 / height))
        _panel(axes, panel, colours, chart.logarithmic)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines()}
    corner = ((width - _LEGEND_INCHES) / width, 1 - 0.6 / height)
    handles = [lines[name] for name in names]
    figure.legend(handles, names, loc="upper left", bbox_to_anchor=corner, frameon=False, fontsize=8.5, labelcolor=_INK)
    return figure


def _panel(axes: Axes, panel: Panel, colours: dict[str, str], logarithmic: bool) -> None:
    places = sorted({x for points in panel.lines.values() for x, _ in points})
    apart = [place for before, place in itertools.pairwise(places) if place - before > places[-1] / 30]
    top = max(y for points in panel.lines.values() for _, y in points) * 1.08
    if logarithmic:
        axes.set_xscale("log")
    for name, points in panel.lines.items():
        across, heights = zip(*sorted(points), strict=True)
        axes.plot(across, heights, "o-", color=colours[name], label=name, linewidth=1.6, markersize=4.5)
    axes.set_ylim(0, top)
    ticks = places if logarithmic else [places[0], *apart]
    axes.set_xticks(ticks, [f"{place:g}" for place in ticks])
    axes.minorticks_off()
    axes.set_title(panel.title, loc="left", fontsize=10, fontweight="bold", color=_INK)
    axes.set_xlabel(panel.across, fontsize=9, color=_FAINT)
    axes.tick_params(labelsize=8.5, colors=_FAINT, length=0)
    axes.grid(axis="y", color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
