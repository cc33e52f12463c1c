"""The result as a chart. The only module of this package that needs matplotlib (``pip install specdec[bench]``)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from bench.harness.chart_style import FAINT, INK
from bench.peers.contender import Kind
from bench.peers.measuring import Row
from bench.peers.table import best_peer

_COLOURS = {
    Kind.GENERATE: "#c9ccd1",
    Kind.PADDED: "#c9ccd1",
    Kind.ASSISTED: "#9aa0a8",
    Kind.LOOP_ALONE: "#cfe3dc",
    Kind.LOOP: "#8cc4b0",
    Kind.ALONE: "#8fb8de",
    Kind.OURS: "#1f6fb5",
}


def draw(rows: Sequence[Row], title: str, subtitle: str, file: Path) -> None:
    """Draw tokens per second: a panel per number of streams, a bar per contender."""
    blocks = {
        streams: [row for row in rows if row.streams == streams] for streams in dict.fromkeys(r.streams for r in rows)
    }
    heights = [len(block) for block in blocks.values()]
    header, footer, bar, gap = 0.85, 0.15, 0.32, 0.6  # inches
    height = header + footer + sum(bar * count for count in heights) + gap * len(heights)
    figure = Figure(figsize=(9.5, height), facecolor="white")
    FigureCanvasAgg(figure)
    figure.text(0.025, 1 - 0.32 / height, title, fontsize=15, fontweight="bold", color=INK, va="center")
    figure.text(0.025, 1 - 0.62 / height, subtitle, fontsize=9.5, color=FAINT, va="center")
    top = height - header
    for (streams, block), count in zip(blocks.items(), heights, strict=True):
        top -= gap * 0.62
        size = bar * count
        axes = figure.add_axes((0.21, (top - size) / height, 0.765, size / height))
        heading = "1 request" if streams == 1 else f"{streams} requests at a time"
        figure.text(0.025, (top + 0.13) / height, heading, fontsize=11, fontweight="bold", color=INK, va="center")
        _panel(axes, block)
        top -= size + gap * 0.38
    figure.savefig(file, dpi=160)


def _panel(axes: Axes, block: Sequence[Row]) -> None:
    places = list(range(len(block)))
    rates = [row.tokens_per_s for row in block]
    axes.barh(places, rates, height=0.72, color=[_COLOURS[row.kind] for row in block])
    # The bar is the median, the dots are the runs.
    for place, row in zip(places, block, strict=True):
        if len(row.runs) > 1:
            values = [run.tokens_per_s for run in row.runs]
            axes.plot(values, [place] * len(values), "o", markersize=2.6, color=INK, alpha=0.45, markeredgewidth=0)
    peer = best_peer(block)
    for place, row in zip(places, block, strict=True):
        label = f"{row.tokens_per_s:.0f}" if row.tokens_per_s >= 100 else f"{row.tokens_per_s:.1f}"
        if row.kind is Kind.OURS and peer:
            label += f"   {row.over(peer):.2f} x best of transformers"
        axes.annotate(
            label,
            (max(row.tokens_per_s, *(run.tokens_per_s for run in row.runs)), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
            fontweight="bold" if row.kind is Kind.OURS else "normal",
        )
    axes.set_yticks(places, [str(row.kind) for row in block], fontsize=9, color=INK)
    axes.set_xlim(0, max(max(run.tokens_per_s for run in row.runs) for row in block) * 1.5)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.set_xticks([])
    for side in ("top", "right", "bottom"):
        axes.spines[side].set_visible(False)
    axes.spines["left"].set_color("#d5d9de")
