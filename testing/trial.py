"""The outcome of one row: observations with figures, and the criteria that were missed. Knows no faults."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Outcome:
    """``seen`` are observations, ``failures`` and ``slow`` fail the row, ``figures`` go to the JSON file."""

    seen: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)  # missed time limits, perhaps only because the machine is busy
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        return not (self.failures or self.slow)

    def note(self, text: str) -> None:
        self.seen.append(text)

    def check(self, good: bool, text: str) -> None:
        """Record the observation ``text``; it is a failure unless ``good``."""
        (self.seen if good else self.failures).append(text)

    def at_most(self, name: str, value: float, limit: float, unit: str = "s") -> None:
        """Record a figure that must not exceed ``limit``. A missed finite time counts as slow, not as a failure."""
        self.figures[name] = round(value, 4)
        shown = f"{name} {value:.3g} {unit}"
        if value <= limit:
            self.note(shown)
        else:
            late = unit in ("s", "ms") and math.isfinite(value)
            (self.slow if late else self.failures).append(f"{shown}, over {limit:.3g}")

    def at_least(self, name: str, value: float, limit: float, unit: str = "") -> None:
        self.figures[name] = round(value, 4)
        shown = f"{name} {value:.3g} {unit}".rstrip()
        self.check(value >= limit, shown if value >= limit else f"{shown}, under {limit:.3g}")


def percentile(values: Iterable[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed; 0 without values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))] if ordered else 0.0
