"""The figures as a chart. The only module of this package that needs matplotlib (``pip install specdec[bench]``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure as Page

from bench.drafts.measuring import FIXED, Figure, Figures, by_parameters
from bench.harness.chart_style import FAINT, INK, style_lines

_COLOURS = dict(zip(FIXED, ("#a8d5c5", "#5fb397", "#2f7d64", "#1c5142"), strict=True))


def draw(shares: Sequence[float], found: Sequence[Figures], file: Path) -> None:
    """Draw tokens per round, and the speed that they allow, over the draft's ``shares`` of the target's parameters: a
    line per number of draft tokens."""
    page = Page(figsize=(9.6, 3.9), facecolor="white")
    FigureCanvasAgg(page)
    axes = page.subplots(1, 2)
    order = sorted(range(len(shares)), key=shares.__getitem__)
    _panel(axes[0], "Tokens per round", shares, found, order, lambda each, *_: each.length)
    _panel(axes[1], "Speed where time grows with parameters", shares, found, order, by_parameters)
    axes[1].axhline(1, color=FAINT, linewidth=1, linestyle=":")
    axes[1].legend(frameon=False, fontsize=8.5, labelcolor=INK, title="draft tokens", title_fontsize=8.5)
    page.tight_layout()
    page.savefig(file, dpi=160)


def _panel(
    axes: Axes,
    title: str,
    shares: Sequence[float],
    found: Sequence[Figures],
    order: Sequence[int],
    height: Callable[[Figure, int, float], float],
) -> None:
    for number in FIXED:
        heights = [height(found[place][number], number, shares[place]) for place in order]
        places = [100 * shares[place] for place in order]
        axes.plot(places, heights, "o-", color=_COLOURS[number], label=str(number), linewidth=1.8, markersize=5)
    axes.set_xscale("log")
    axes.set_xticks([100 * share for share in shares], [f"{100 * share:.0f} %" for share in shares])
    axes.minorticks_off()
    axes.set_ylim(0)
    style_lines(axes, title, "the draft's parameters, in % of the target's")
