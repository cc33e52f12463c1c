"""What a token costs at a distance, by one formula for every mode; fitted on some distances, it predicts another.

Milliseconds per token at a round trip of r ms to the draft:

    (s + w r) / E

E tokens come of a round that takes s ms at no distance, and a share w of the rounds waits for the way to the draft:
none where the target is alone (s is then a pass and what surrounds it), all where the draft is synchronous
(s = K draft steps + the pass), and where it grows ahead those that were not foreseen: w = 1 - hit rate,
s = the pass + w K draft steps. A tree that comes late is not waited for, it is a verdict that was not foreseen;
so distance shows in w alone.

E is measured. s, and w where it is not known, are fitted by least squares of the relative error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.distance.modes import waiting
from bench.distance.row import Row

FITTED_MS = (0.0, 1.0, 5.0, 50.0)
PREDICTED_MS = 20.0


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured at one distance."""

    round_trip_ms: float
    ms_per_token: float
    tokens_per_round: float


@dataclass(frozen=True, slots=True)
class Formula:
    """s, w and E of the module's docstring."""

    round_ms: float
    waiting: float
    tokens_per_round: float

    def ms_per_token(self, round_trip_ms: float) -> float:
        return (self.round_ms + self.waiting * round_trip_ms) / self.tokens_per_round


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of one mode, at a distance that nothing was fitted on. ``error`` is relative."""

    pair: str
    temperature: float
    mode: str
    formula: Formula
    round_trip_ms: float
    predicted_ms_per_token: float
    measured_ms_per_token: float
    error: float


def fit(points: Sequence[Point], share: float | None) -> Formula:
    """``share`` is w; None: fit it, between 0 and 1. Needs a point, or two different distances for w."""
    tokens_per_round = sum(point.tokens_per_round for point in points) / len(points)
    # s * ones[i] + w * trips[i] is to be 1.
    ones = [1 / (tokens_per_round * point.ms_per_token) for point in points]
    trips = [one * point.round_trip_ms for one, point in zip(ones, points, strict=True)]
    if share is None:
        aa, ab, bb = _dot(ones, ones), _dot(ones, trips), _dot(trips, trips)
        slope = (aa * sum(trips) - ab * sum(ones)) / (aa * bb - ab * ab)
        share = max(0.0, min(slope, 1.0))
    round_ms = sum((1 - share * trip) * one for one, trip in zip(ones, trips, strict=True)) / _dot(ones, ones)
    return Formula(round_ms, share, tokens_per_round)


def predictions(rows: Sequence[Row]) -> list[Prediction]:
    """Of every mode that was measured at all distances."""
    found = []
    for key in dict.fromkeys((row.pair, row.temperature, row.mode) for row in rows):
        points = {
            row.round_trip_ms: Point(row.round_trip_ms, 1e3 / row.tokens_per_s, row.tokens_per_round)
            for row in rows
            if (row.pair, row.temperature, row.mode) == key and row.round_trip_ms is not None
        }
        if not points.keys() >= {*FITTED_MS, PREDICTED_MS}:
            continue
        formula = fit([points[each] for each in FITTED_MS], waiting(key[2]))
        predicted, measured = formula.ms_per_token(PREDICTED_MS), points[PREDICTED_MS].ms_per_token
        found.append(Prediction(*key, formula, PREDICTED_MS, predicted, measured, predicted / measured - 1))
    return found


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(one * other for one, other in zip(left, right, strict=True))
