"""The time of one pass of a model as a function of its rows. Knows a curve; does not know the model."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PassTime:
    """A piecewise linear pass time. ``points`` are (rows, seconds), rows ascending, seconds never decreasing.

    It is constant before the first point and extrapolates the last segment after the last point. Raises ValueError.
    """

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        rows = [point[0] for point in self.points]
        times = [point[1] for point in self.points]
        if not self.points or rows[0] < 0 or times[0] <= 0:
            raise ValueError("a pass needs rows >= 0 and a time > 0")
        if any(later <= earlier for earlier, later in pairwise(rows)):
            raise ValueError("the rows of a table must ascend")
        if any(later < earlier for earlier, later in pairwise(times)):
            raise ValueError("more rows cannot take less time")

    @staticmethod
    def line(base_s: float, row_s: float = 0.0) -> PassTime:
        """``base_s`` per pass plus ``row_s`` per row."""
        return PassTime(((0.0, base_s), (1.0, base_s + row_s)))

    @staticmethod
    def parse(text: str) -> PassTime:
        """Parse milliseconds: "20" (a pass), "20+0.05" (and each row) or "1:20,64:22" (rows:ms). Raises ValueError."""
        try:
            if ":" in text:
                pairs = [part.split(":") for part in text.split(",")]
                return PassTime(tuple((float(rows), float(ms) / 1e3) for rows, ms in pairs))
            base, _, row = text.partition("+")
            return PassTime.line(float(base) / 1e3, float(row or 0) / 1e3)
        except ValueError as error:
            reason = str(error) if "rows" in str(error) else "not MS, MS+MS or ROWS:MS,ROWS:MS,..."
            raise ValueError(f"{text!r}: {reason}") from None

    @staticmethod
    def read(file: str) -> PassTime:
        """Read measured passes: a line for each, with its rows and its seconds. Equal rows are averaged. More rows than
        those of a slower measurement are taken to be as slow, because measurements scatter. Raises ValueError."""
        try:
            lines = [line.replace(",", " ").split() for line in Path(file).read_text().splitlines() if line.strip()]
            measured = [(float(rows), float(seconds)) for rows, seconds in lines]
        except (OSError, ValueError) as error:
            raise ValueError(f"{file}: no lines of ROWS SECONDS: {error}") from None
        by_rows: dict[float, list[float]] = {}
        for rows, seconds in sorted(measured):
            by_rows.setdefault(rows, []).append(seconds)
        means = accumulate((sum(times) / len(times) for times in by_rows.values()), max)
        return PassTime(tuple(zip(by_rows, means, strict=True)))

    def seconds(self, rows: float) -> float:
        """The time of a pass with ``rows`` rows."""
        points = self.points
        if rows <= points[0][0] or len(points) == 1:
            return points[0][1]
        above = min(bisect_right(points, (rows, float("inf"))), len(points) - 1)
        (left, left_s), (right, right_s) = points[above - 1], points[above]
        return left_s + (rows - left) / (right - left) * (right_s - left_s)
