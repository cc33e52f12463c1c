"""The results of the grid as a table and a heat map."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

from rich.table import Table
from rich.text import Text

from bench.control.grid import ACCEPTANCES, DISTANCES, KNEES, ROUNDS, STEPS, Point, Result

MIN_OVER_ALONE, MIN_SHARED = 0.95, 0.90
"""Of the target alone: where each model has a device of its own, and where they share one."""

_COLOURS = ((0.85, "red"), (0.92, "dark_orange"), (0.97, "yellow4"), (1.02, "green4"), (10.0, "dark_green"))


def summary(results: Sequence[Result]) -> Table:
    """Medians by the price of rows and the number of sequences."""
    table = Table("rows", "N", "over alone", "over best K", "10th %")
    groups = {
        (rows, count): [r for r in results if (r.point.rows, r.point.sequences) == (rows, count)]
        for rows in KNEES
        for count in ROUNDS
    }
    for (rows, count), group in [*groups.items(), (("all", 0), list(results))]:
        if not group:
            continue
        over_best = [result.over_best for result in group]
        table.add_row(
            rows,
            str(count or ""),
            f"{statistics.median(result.over_alone for result in group):.2f}",
            f"{statistics.median(over_best):.2f}",
            f"{tenth_percentile(over_best):.2f}",
            end_section=count == max(ROUNDS),
        )
    return table


def tenth_percentile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 10]


def ratios(results: Sequence[Result]) -> dict[str, float]:
    """The figures that decide, by name."""
    over_best = [result.over_best for result in results]
    return {
        "over_best_median": round(statistics.median(over_best), 3),
        "over_best_p10": round(tenth_percentile(over_best), 3),
    }


def slower_than_alone(results: Sequence[Result]) -> list[Result]:
    """Points at which the policy makes fewer tokens than the target alone, by more than is allowed; the worst first."""
    slow = [r for r in results if r.over_alone < (MIN_SHARED if r.point.shared else MIN_OVER_ALONE)]
    return sorted(slow, key=lambda result: result.over_alone)


def heat_map(results: Sequence[Result], value: Callable[[Result], float], title: str) -> Text:
    """Percent in every cell: acceptance and step downwards, price of rows, sequences and distance to the right."""
    by_point = {result.point: result for result in results}
    text = Text(f"{title}, percent (00: 100 or more)\n", style="bold")
    width = 2 * len(DISTANCES) * len(ROUNDS)
    text.append(" " * 8 + "".join(rows.ljust(width) for rows in KNEES) + "\n", style="dim")
    counts = "".join(f"N={count}".ljust(2 * len(DISTANCES)) for count in ROUNDS)
    text.append(" " * 8 + counts * len(KNEES) + "\n", style="dim")
    for acceptance in ACCEPTANCES:
        for step in STEPS:
            text.append(f"{acceptance:.2f}".lstrip("0") + f"{step:5.2f}".replace("0.", ".").rjust(4) + " ", style="dim")
            for rows in KNEES:
                for count in ROUNDS:
                    for distance in DISTANCES:
                        result = by_point.get(Point(rows, acceptance, step, distance, count))
                        text.append(*_cell(value(result)) if result else "  ")
            text.append("\n")
    text.append(
        f"acceptance and step (of a pass) downwards; distance {', '.join(map(str, DISTANCES))} of a pass in each N",
        style="dim",
    )
    return text


def _cell(value: float) -> tuple[str, str]:
    colour = next(colour for bound, colour in _COLOURS if value < bound)
    return f"{round(100 * value) % 100:02}" if value < 1 else "00", f"white on {colour}"
