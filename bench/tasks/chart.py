"""The table as a chart. The only module of this package that needs matplotlib (``pip install specdec[bench]``)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import TwoSlopeNorm
from matplotlib.figure import Figure

from bench.harness.chart_style import FAINT, INK
from bench.tasks.table import Figures


def draw(figures: Figures, subtitle: str, file: Path) -> None:
    """Draw the speed over the target alone of each task (row) and method (column), and tokens per pass below it."""
    tasks, methods = list(figures), list(next(iter(figures.values())))
    width, height = 2.0 + 1.05 * len(methods), 1.5 + 0.55 * len(tasks)
    figure = Figure(figsize=(width, height), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.02, 1 - 0.28 / height, "Speed over the target alone", fontsize=14, fontweight="bold", color=INK)
    figure.text(0.02, 1 - 0.55 / height, subtitle, fontsize=9, color=FAINT)
    axes = figure.add_axes((1.5 / width, 0.1 / height, (width - 1.6) / width, (height - 1.2) / height))
    speeds = [[figures[task][method].speed for method in methods] for task in tasks]
    axes.imshow(speeds, cmap="RdBu", norm=TwoSlopeNorm(1.0, 0.4, 2.0), aspect="auto")
    for row, task in enumerate(tasks):
        for column, method in enumerate(methods):
            length, speed, _ = figures[task][method]
            ink = "white" if speed > 1.6 or speed < 0.6 else INK
            place: dict[str, Any] = {"ha": "center", "va": "center"}
            axes.text(column, row - 0.14, f"{speed:.2f} x", color=ink, fontsize=10, fontweight="bold", **place)
            axes.text(column, row + 0.24, f"{length:.2f} tokens", color=ink, fontsize=7, **place)
    axes.set_xticks(range(len(methods)), [name.replace(" ", "\n") for name in methods], fontsize=9, color=INK)
    axes.set_yticks(range(len(tasks)), [name.replace("_", " ") for name in tasks], fontsize=9, color=INK)
    axes.xaxis.tick_top()
    axes.tick_params(length=0)
    for side in axes.spines.values():
        side.set_visible(False)
    figure.savefig(file, dpi=160)
