"""What a token costs at a distance, by one formula for every mode; fitted on some distances, it predicts another.

Milliseconds per token at a round trip of r ms to the draft:

    (s + w r) / E

E tokens come of a round that takes s ms where the draft is near, and a share w of the rounds waits for a round trip:

- none where the target is alone; s is a pass and what surrounds it;
- all where the draft is synchronous; s is K draft steps more;
- where it grows ahead, those that were not foreseen. After a round that waited for its tree, what is grown ahead comes
  right behind that tree, from however far: the verdict is foreseen with chance h. After a round that did not wait,
  the draft first has to hear of it. While r is within a pass that is in time, and w = 1 - h. Beyond it is too late:
  no two verdicts in a row are foreseen, and w = 1 / (1 + h).

What is measured without a clock is not fitted: E, h (the share of drafts that nobody waited for, at distances within a
pass) and the pass itself, as the target tells it. s is fitted by least squares of the relative error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.distance.modes import AHEAD, ALONE
from bench.distance.row import Row

FITTED_MS = (0.0, 1.0, 5.0, 50.0)
PREDICTED_MS = 20.0


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured at one distance. ``on_time`` is the share of drafts that nobody waited for."""

    round_trip_ms: float
    ms_per_token: float
    tokens_per_round: float
    pass_ms: float
    on_time: float = 0.0


@dataclass(frozen=True, slots=True)
class Formula:
    """s, h and E of the module's docstring, and the pass; ``hit_rate`` is None where the target is alone."""

    round_ms: float
    hit_rate: float | None
    tokens_per_round: float
    pass_ms: float

    def waiting(self, round_trip_ms: float) -> float:
        """w: the share of rounds that wait for the draft."""
        if self.hit_rate is None:
            return 0.0
        return 1 - self.hit_rate if round_trip_ms <= self.pass_ms else 1 / (1 + self.hit_rate)

    def ms_per_token(self, round_trip_ms: float) -> float:
        return (self.round_ms + self.waiting(round_trip_ms) * round_trip_ms) / self.tokens_per_round


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


def alone(points: Sequence[Point]) -> Formula:
    """Of the target without a draft."""
    return _fitted(points, None)


def synchronous(points: Sequence[Point]) -> Formula:
    """Of a draft that is waited for in every round."""
    return _fitted(points, 0.0)


def ahead(points: Sequence[Point]) -> Formula:
    """Of a draft that grows ahead. Some point must be within a pass."""
    pass_ms = _mean([point.pass_ms for point in points])
    return _fitted(points, _mean([point.on_time for point in points if point.round_trip_ms <= pass_ms]))


def predictions(rows: Sequence[Row]) -> list[Prediction]:
    """Of every mode that was measured at all distances."""
    found = []
    for key in dict.fromkeys((row.pair, row.temperature, row.mode) for row in rows):
        points = {
            row.round_trip_ms: Point(
                row.round_trip_ms,
                1e3 / row.tokens_per_s,
                row.tokens_per_round,
                row.round_ms.target_pass,
                row.on_time or 0.0,
            )
            for row in rows
            if (row.pair, row.temperature, row.mode) == key and row.round_trip_ms is not None
        }
        if not points.keys() >= {*FITTED_MS, PREDICTED_MS}:
            continue
        of_mode = {ALONE.name: alone, AHEAD.name: ahead}.get(key[2], synchronous)
        formula = of_mode([points[each] for each in FITTED_MS])
        predicted, measured = formula.ms_per_token(PREDICTED_MS), points[PREDICTED_MS].ms_per_token
        found.append(Prediction(*key, formula, PREDICTED_MS, predicted, measured, predicted / measured - 1))
    return found


def _fitted(points: Sequence[Point], hit_rate: float | None) -> Formula:
    """The best s."""
    tokens_per_round = _mean([point.tokens_per_round for point in points])
    pass_ms = _mean([point.pass_ms for point in points])
    formula = Formula(0.0, hit_rate, tokens_per_round, pass_ms)
    # s * ones[i] + trips[i] is to be 1.
    ones = [1 / (tokens_per_round * point.ms_per_token) for point in points]
    trips = [formula.ms_per_token(point.round_trip_ms) / point.ms_per_token for point in points]
    squares = sum(one * one for one in ones)
    round_ms = sum(one * (1 - trip) for one, trip in zip(ones, trips, strict=True)) / squares
    return Formula(round_ms, hit_rate, tokens_per_round, pass_ms)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
