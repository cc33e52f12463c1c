"""The figures of answers by task and method, and their tables, which fit 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from rich.table import Table

from bench.tasks.asking import Answered
from bench.tasks.methods import ALONE, METHODS


class Figure(NamedTuple):
    """Of a task by one method: tokens per pass (a mean over turns), and the speed over the target alone (a median over
    turns, and by the seconds of all turns together)."""

    length: float
    speed: float
    speed_of_all: float


Figures = Mapping[str, Mapping[str, Figure]]
"""By task and method."""


def figures_of(found: Sequence[Answered]) -> Figures:
    """Methods are in the order of METHODS."""
    figures: dict[str, dict[str, Figure]] = {}
    asked = {answer.method for answer in found}
    for task in dict.fromkeys(answer.task for answer in found):
        alone = [answer.seconds for answer in found if (answer.task, answer.method) == (task, ALONE)]
        for method in (name for name in METHODS if name in asked):
            those = [answer for answer in found if (answer.task, answer.method) == (task, method)]
            length = fmean(each.num_tokens / max(1, each.num_rounds) for each in those)
            speed = median(base / each.seconds for base, each in zip(alone, those, strict=True))
            of_all = sum(alone) / sum(each.seconds for each in those)
            figures.setdefault(task, {})[method] = Figure(length, speed, of_all)
    return figures


def tables(figures: Figures) -> list[Table]:
    """Both speeds, and tokens per pass: a row for each method and a column for each task, its best in bold. The last
    row of speeds is that of all methods at once over that of the best other one."""
    methods = list(next(iter(figures.values())))
    made = []
    for which, title in (
        (1, "Speed over the target alone (medians)"),
        (2, "Speed over the target alone, by the time of all answers together"),
        (0, "Tokens per pass (means)"),
    ):
        table = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 1, 0, 0))
        table.add_column(vertical="bottom", no_wrap=True)
        for task in figures:
            table.add_column(task.replace("_", " "), overflow="fold", min_width=4, vertical="bottom")
        best = {task: max(each[which] for each in figures[task].values()) for task in figures}
        for method in methods:
            row = ((figures[task][method][which], best[task]) for task in figures)
            table.add_row(method, *(f"{'[bold]' * (each == most)}{each:.2f}" for each, most in row))
        if which and len(methods) > 1 and "all" in methods:
            single = (max(figures[task][name][which] for name in methods if name != "all") for task in figures)
            ratios = (f"{figures[task]['all'][which] / other:.2f}" for task, other in zip(figures, single, strict=True))
            table.add_row("all / best", *ratios, style="dim")
        made.append(table)
    return made
