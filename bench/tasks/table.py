"""The figures of answers by task and method, and their tables, which fit 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean, median

from rich.table import Table

from bench.tasks.asking import Answered
from bench.tasks.methods import ALONE, METHODS

Figures = Mapping[str, Mapping[str, tuple[float, float]]]
"""By task and method: tokens per pass, and the speed over the target alone."""


def figures_of(found: Sequence[Answered]) -> Figures:
    """Tokens per pass are a mean over turns, speeds a median. Methods are in the order of METHODS."""
    figures: dict[str, dict[str, tuple[float, float]]] = {}
    asked = {answer.method for answer in found}
    for task in dict.fromkeys(answer.task for answer in found):
        alone = [answer.seconds for answer in found if (answer.task, answer.method) == (task, ALONE)]
        for method in (name for name in METHODS if name in asked):
            those = [answer for answer in found if (answer.task, answer.method) == (task, method)]
            length = fmean(each.num_tokens / max(1, each.num_rounds) for each in those)
            speed = median(base / each.seconds for base, each in zip(alone, those, strict=True))
            figures.setdefault(task, {})[method] = length, speed
    return figures


def tables(figures: Figures) -> list[Table]:
    """Speeds, and tokens per pass: a row for each method and a column for each task, its best in bold. The last row is
    the speed of all methods at once over that of the best other one."""
    methods = list(next(iter(figures.values())))
    made = []
    for which, title in ((1, "Speed over the target alone"), (0, "Tokens per pass")):
        table = Table(title=title, title_justify="left", header_style="bold", box=None, padding=(0, 1, 0, 0))
        table.add_column(vertical="bottom", no_wrap=True)
        for task in figures:
            table.add_column(task.replace("_", " "), overflow="fold", min_width=4, vertical="bottom")
        best = {task: max(each[which] for each in figures[task].values()) for task in figures}
        for method in methods:
            row = ((figures[task][method][which], best[task]) for task in figures)
            table.add_row(method, *(f"{'[bold]' * (each == most)}{each:.2f}" for each, most in row))
        made.append(table)
    if len(methods) > 1 and "all" in methods:
        single = {task: max(s for name, (_, s) in figures[task].items() if name != "all") for task in figures}
        ratios = (f"{figures[task]['all'][1] / single[task]:.2f}" for task in figures)
        made[0].add_row("all / best", *ratios, style="dim")
    return made
