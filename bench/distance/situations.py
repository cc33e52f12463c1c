"""Which modes are measured in which situations. Knows distances and failures; does not know how a mode is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.distance.formula import FITTED_MS, PREDICTED_MS
from bench.distance.modes import AHEAD, ALONE, UNRELATED, Mode, modes

ROUND_TRIPS_MS = tuple(sorted((*FITTED_MS, PREDICTED_MS)))
MAX_REQUESTS = 32
_FIXED = (4, 6, 8)
"""The fixed numbers of draft tokens to compare."""


@dataclass(frozen=True, slots=True)
class Situation:
    """The distance to the draft, the number of concurrent requests, and the modes that take turns there."""

    place: str
    modes: Sequence[Mode]
    temperature: float = 0.0
    round_trip_ms: float | None = None
    num_requests: int = 1
    draft_is_there: bool = True

    @property
    def name(self) -> str:
        return f"{self.place}, T = {self.temperature:g}"


def situations(temperatures: Sequence[float], quick: bool, with_unrelated: bool = False) -> list[Situation]:
    """The distances at each temperature, then load and failures at temperature 0 only. ``quick``: with fewer modes at
    other temperatures; ``with_unrelated``: there is an unrelated draft."""
    distances = [
        Situation(f"{trip:g} ms", modes(_FIXED, quick and temperature > 0), temperature, trip)
        for temperature in temperatures
        for trip in ROUND_TRIPS_MS
    ]
    if 0.0 not in temperatures:
        return distances
    return [
        *distances,
        Situation(f"{MAX_REQUESTS} requests", [ALONE, AHEAD], num_requests=MAX_REQUESTS),
        *([Situation("unrelated", [ALONE, UNRELATED])] if with_unrelated else []),
        Situation("gone", [ALONE, AHEAD], draft_is_there=False),
    ]
