"""How charts of benchmarks look. Needs matplotlib (``pip install specdec[bench]``)."""

from __future__ import annotations

from matplotlib.axes import Axes

INK, FAINT = "#22262b", "#7a828c"


def style_lines(axes: Axes, title: str, across: str) -> None:
    """Give a panel of lines its title, the name of its horizontal axis, and a grid without a frame."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=INK)
    axes.set_xlabel(across, fontsize=9, color=FAINT)
    axes.tick_params(labelsize=8.5, colors=FAINT, length=0)
    axes.grid(axis="y", color="#e6e8eb", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#d5d9de")
