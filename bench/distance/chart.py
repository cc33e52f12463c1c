"""The result as a chart. The only module of this package that needs matplotlib (``pip install specdec[bench]``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.distance.modes import ADAPTIVE, AHEAD, ALONE, is_fixed
from bench.distance.row import Row
from bench.distance.table import sections
from bench.harness.chart_style import INK, style_lines

_NAMED = {AHEAD.name: "#1f6fb5", ALONE.name: "#7a828c", ADAPTIVE.name: "#d08a2e"}
_FIXED = ("#a8d5c5", "#5fb397", "#2f7d64", "#1c5142")
_BLOCK = ("#d9b8dd", "#b07ab8", "#7d4488", "#55285f")


def draw(rows: Sequence[Row], labels: Mapping[str, str], file: Path) -> None:
    """Draw a panel per pair and temperature: tokens per second over the round trip to the draft, a line per mode."""
    panels = list(sections([row for row in rows if row.round_trip_ms is not None]))
    columns = min(2, len(panels))
    lines = (len(panels) + columns - 1) // columns
    width, height, header = 6.1 * columns, 3.9 * lines + 0.6, 0.6  # inches
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    left = 0.3 / width
    title = "Tokens per second with the draft at a distance"
    figure.text(left, 1 - 0.3 / height, title, fontsize=15, fontweight="bold", color=INK, va="center")
    for place, (pair, temperature, some) in enumerate(panels):
        column, line = place % columns, place // columns
        top = height - header - 3.9 * line
        axes = figure.add_axes(((6.1 * column + 0.6) / width, (top - 3.35) / height, 4.1 / width, 3.0 / height))
        label = labels[pair].partition(":")[0]
        _panel(axes, f"{label}, T = {temperature:g}", some, _colours([row.mode for row in rows if row.pair == pair]))
    figure.savefig(file, dpi=160)


def _panel(axes: Axes, title: str, rows: Sequence[Row], colours: Mapping[str, str]) -> None:
    farthest_ms = max(row.round_trip_ms or 0.0 for row in rows)
    ends: dict[str, float] = {}
    for mode in dict.fromkeys(row.mode for row in rows):
        trips, speeds = zip(
            *sorted((row.round_trip_ms or 0.0, row.tokens_per_s) for row in rows if row.mode == mode), strict=True
        )
        width, size = (2.4, 5.5) if mode == AHEAD.name else (1.3, 4.5)
        axes.plot(trips, speeds, "o-", color=colours[mode], linewidth=width, markersize=size, zorder=2 + width)
        ends[mode] = speeds[-1]
    highest = max(row.tokens_per_s for row in rows) * 1.08
    axes.set_xlim(-1.5, farthest_ms + 1)
    axes.set_ylim(0, highest)
    for mode, place in _apart(ends, 0.052 * highest).items():
        weight = "bold" if mode == AHEAD.name else "normal"
        axes.annotate(
            mode,
            (farthest_ms + 1, ends[mode]),
            xytext=(farthest_ms + 5, place),
            fontsize=8.5,
            fontweight=weight,
            color=colours[mode],
            va="center",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colours[mode], "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0},
        )
    axes.set_xticks(sorted({row.round_trip_ms or 0.0 for row in rows} - {1.0}))
    style_lines(axes, title, "round trip to the draft, ms")


def _colours(of_rows: Sequence[str]) -> dict[str, str]:
    """The colour of each mode; more draft tokens are darker."""
    modes = list(dict.fromkeys(of_rows))
    fixed = [mode for mode in modes if is_fixed(mode)]
    others = [mode for mode in modes if mode not in fixed and mode not in _NAMED]
    shades = {
        **dict(zip(fixed, _FIXED, strict=False)),
        **dict(zip(others, _BLOCK, strict=False)),
    }
    return {mode: _NAMED.get(mode) or shades[mode] for mode in modes}


def _apart(wanted: Mapping[str, float], least: float) -> dict[str, float]:
    """Positions of labels, as near as possible to ``wanted`` and at least ``least`` apart."""
    order = sorted(wanted, key=wanted.__getitem__)
    groups: list[list[str]] = []
    for name in order:
        groups.append([name])
        while len(groups) > 1 and _bottom(groups[-1], wanted, least) < _top(groups[-2], wanted, least) + least:
            last = groups.pop()
            groups[-1] += last
    return {name: _bottom(group, wanted, least) + least * place for group in groups for place, name in enumerate(group)}


def _bottom(group: Sequence[str], wanted: Mapping[str, float], least: float) -> float:
    middle = sum(wanted[name] for name in group) / len(group)
    return middle - least * (len(group) - 1) / 2


def _top(group: Sequence[str], wanted: Mapping[str, float], least: float) -> float:
    return _bottom(group, wanted, least) + least * (len(group) - 1)
