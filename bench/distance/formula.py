"""The time per token by the distance to the draft: one formula for all modes, fitted on some distances to predict one.

A round takes s ms without its waits, and a round with a draft gives E tokens. r is the round trip to the draft in ms.

- The target alone, and modes that wait for the draft: (s + w (r + d)) / E. w is the share of rounds that wait: 0 for
  the target alone (E = 1), 1 for a fixed K. In the adaptive synchronous mode it is measured, at any distance: the other
  rounds had a prompt-lookup proposal or no draft. d is the time of the draft's steps; for a fixed K it is part of s.
- A draft that grows ahead: see `ahead_round` in specdec/speculation/cost.py.

Measured, not fitted: E, the hit rate (at distances within a pass), the share of drafts with a correct first token, the
pass time reported by the target, d (waiting time minus r), and w. s is fitted so that the mean relative error is 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.distance.modes import ADAPTIVE, AHEAD, ALONE
from bench.distance.row import Row
from specdec.speculation.cost import Round, ahead_round

FITTED_MS = (0.0, 1.0, 5.0, 50.0)
PREDICTED_MS = 20.0

_NUM_BISECTIONS = 60


@dataclass(frozen=True, slots=True)
class Point:
    """The measurements at one distance. ``hits`` is the hit rate, ``firsts`` the share of drafts with a correct first
    token. ``waits`` is the share of all rounds that waited for the draft, ``waited_ms`` the mean waiting time of all
    rounds."""

    round_trip_ms: float
    ms_per_token: float
    tokens_per_round: float
    pass_ms: float
    hits: float = 0.0
    firsts: float = 0.0
    waits: float = 0.0
    waited_ms: float = 0.0

    @staticmethod
    def of(row: Row) -> Point:
        # Ahead, some rounds have no draft. They must not lower the mean of the rounds with a draft.
        goes_alone = row.mode == AHEAD.name and row.drafts_per_round > 0
        return Point(
            row.round_trip_ms or 0.0,
            1e3 / row.tokens_per_s,
            1 + row.accepted_per_round / row.drafts_per_round if goes_alone else row.tokens_per_round,
            row.round_ms.target_pass,
            row.outcomes.hits or 0.0,
            row.outcomes.firsts or 0.0,
            (1 - (row.on_time or 0.0)) * row.drafts_per_round,
            row.round_ms.draft_wait,
        )


@dataclass(frozen=True, slots=True)
class Formula:
    """s, the hit rate, E, the pass time, d, the share of correct first tokens, and w. ``hit_rate`` is None if nothing
    grows ahead; ``waits`` is used only then."""

    round_ms: float
    hit_rate: float | None
    tokens_per_round: float
    pass_ms: float
    wait_ms: float = 0.0
    first_rate: float = 0.0
    waits: float = 0.0

    def ms_per_token(self, round_trip_ms: float) -> float:
        wait_ms, drafted = round_trip_ms + self.wait_ms, Round(self.tokens_per_round, self.round_ms)
        if self.hit_rate is None:
            return (drafted.seconds + self.waits * wait_ms) / drafted.tokens
        num_late = 1 + int(round_trip_ms // self.pass_ms) if self.pass_ms else 1
        mean = ahead_round(drafted, wait_ms, self.hit_rate, first_rate=self.first_rate, num_late=num_late)
        return mean.seconds / mean.tokens


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted time per token of one mode at a distance that was not fitted. ``error`` is relative."""

    pair: str
    temperature: float
    mode: str
    formula: Formula
    round_trip_ms: float
    predicted_ms_per_token: float
    measured_ms_per_token: float
    error: float


def alone(points: Sequence[Point]) -> Formula:
    """The formula of the target without a draft."""
    return _fitted(points)


def synchronous(points: Sequence[Point]) -> Formula:
    """The formula of rounds that always wait for a draft."""
    return _fitted(points, waits=1.0)


def adaptive(points: Sequence[Point]) -> Formula:
    """The formula of rounds that wait for a draft where that pays."""
    return _fitted(points, wait_ms=_wait_overhead_ms(points), waits=_mean([point.waits for point in points]))


def ahead(points: Sequence[Point]) -> Formula:
    """The formula of a draft that grows ahead. At least one point must be within a pass."""
    pass_ms = _mean([point.pass_ms for point in points])
    # If no round waited, waiting was never the faster way.
    wait_ms = _wait_overhead_ms(points) if any(point.waits for point in points) else float("inf")
    hit_rate = _mean([point.hits for point in points if point.round_trip_ms <= pass_ms])
    return _fitted(points, hit_rate, wait_ms, _mean([point.firsts for point in points]))


def predictions(rows: Sequence[Row]) -> list[Prediction]:
    """Predictions for every mode that was measured at all distances."""
    found = []
    for key in dict.fromkeys((row.pair, row.temperature, row.mode) for row in rows):
        points = {
            row.round_trip_ms: Point.of(row)
            for row in rows
            if (row.pair, row.temperature, row.mode) == key and row.round_trip_ms is not None
        }
        if not points.keys() >= {*FITTED_MS, PREDICTED_MS}:
            continue
        of_mode = {ALONE.name: alone, ADAPTIVE.name: adaptive, AHEAD.name: ahead}.get(key[2], synchronous)
        formula = of_mode([points[each] for each in FITTED_MS])
        predicted, measured = formula.ms_per_token(PREDICTED_MS), points[PREDICTED_MS].ms_per_token
        found.append(Prediction(*key, formula, PREDICTED_MS, predicted, measured, predicted / measured - 1))
    return found


def _fitted(
    points: Sequence[Point],
    hit_rate: float | None = None,
    wait_ms: float = 0.0,
    first_rate: float = 0.0,
    waits: float = 0.0,
) -> Formula:
    """The formula with the s at which the mean relative error is 0."""
    pass_ms = _mean([point.pass_ms for point in points])
    tokens_per_round = _mean([point.tokens_per_round for point in points])
    low_ms, high_ms = 0.0, max(point.ms_per_token for point in points) * tokens_per_round
    for _ in range(_NUM_BISECTIONS):
        round_ms = (low_ms + high_ms) / 2
        formula = Formula(round_ms, hit_rate, tokens_per_round, pass_ms, wait_ms, first_rate, waits)
        error = _mean([formula.ms_per_token(point.round_trip_ms) / point.ms_per_token - 1 for point in points])
        low_ms, high_ms = (low_ms, round_ms) if error > 0 else (round_ms, high_ms)
    return formula


def _wait_overhead_ms(points: Sequence[Point]) -> float:
    """d: the mean waiting time minus the round trip; 0 if no round waited."""
    num_waits = sum(point.waits for point in points)
    waited_ms = sum(point.waited_ms - point.waits * point.round_trip_ms for point in points)
    return max(0.0, waited_ms / num_waits) if num_waits else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
