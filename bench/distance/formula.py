"""The time per token by the distance to the draft: one formula for all modes, fitted on some distances to predict one.

Milliseconds per token, where r is the round trip to the draft in ms, and a round takes s ms without its waits:

    waiting:             (s + w (r + d)) / E
    without a draft:     s (1 + (1 - h) n) / (E + (1 - h) n)

A round with a draft gives E tokens. w is the share of these rounds after which the next draft is missing and awaited:

- w = 0 for the target alone (E = 1). w = 1 for a fixed K; d, the time of the draft's steps, is then part of s.
- In the adaptive synchronous mode, w is the measured share of rounds that waited, at any distance. The other rounds
  had a prompt-lookup proposal or no draft.
- Where the draft grows ahead, w is the share of misses. After a round that waited for its tree, the nodes grown ahead
  arrive right behind that tree, at any distance: a hit with probability h. After a round that did not wait, the draft
  must first hear of it. If r is within a pass, it hears in time and w = 1 - h. Beyond a pass it is too late: two hits
  never follow each other, and w = 1 / (1 + h).

The controller of a draft ahead either waits for a missing tree or continues without it, whichever is faster. So does
the formula. A round without a draft gives one token. The tree grown below that token arrives m rounds later (m = 1
within a pass) and is usable if it holds all m tokens since, each with probability g. That takes n = m - 1 + 1 / g^m
rounds. The draft is m rounds ahead then, so its next trees are hits with probability h at any distance.

Measured, not fitted: E, h (the hit rate at distances within a pass), g (the share of drafts with a correct first
token), the pass time reported by the target, d (waiting time minus r), and w where stated. s is fitted by least squares
of the relative error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.distance.modes import ADAPTIVE, AHEAD, ALONE
from bench.distance.row import Row

FITTED_MS = (0.0, 1.0, 5.0, 50.0)
PREDICTED_MS = 20.0

_NUM_ITERATIONS = 20
"""The faster way depends on s, and the fitted s on that way; a few iterations converge."""


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
    """s, h, E, d, g and w of the module's docstring, and the pass time. ``hit_rate`` is None if nothing grows ahead;
    ``waits`` is used only then."""

    round_ms: float
    hit_rate: float | None
    tokens_per_round: float
    pass_ms: float
    wait_ms: float = 0.0
    first_rate: float = 0.0
    waits: float = 0.0

    def missing(self, round_trip_ms: float) -> float:
        """w: the share of rounds that wait for the draft, in a mode that waits."""
        if self.hit_rate is None:
            return self.waits
        return 1 - self.hit_rate if round_trip_ms <= self.pass_ms else 1 / (1 + self.hit_rate)

    def ms_per_token(self, round_trip_ms: float) -> float:
        rounds, waiting_ms = self.way(round_trip_ms)
        return rounds * self.round_ms + waiting_ms

    def way(self, round_trip_ms: float) -> tuple[float, float]:
        """Rounds and milliseconds of waiting per token, for the faster of waiting and continuing without a draft."""
        missing, expected = self.missing(round_trip_ms), self.tokens_per_round  # w and E
        waiting_ms = missing * (round_trip_ms + self.wait_ms) if missing else 0.0
        ways = [(1 / expected, waiting_ms / expected)]
        if self.first_rate and self.hit_rate is not None:
            late = 1 + int(round_trip_ms // self.pass_ms)
            alone = (1 - self.hit_rate) * (late - 1 + self.first_rate**-late)
            ways.append(((1 + alone) / (expected + alone), 0.0))
        return min(ways, key=lambda way: way[0] * self.round_ms + way[1])


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
    """The formula with the s that minimises the squared relative error."""
    pass_ms = _mean([point.pass_ms for point in points])
    tokens_per_round = _mean([point.tokens_per_round for point in points])
    formula = Formula(pass_ms, hit_rate, tokens_per_round, pass_ms, wait_ms, first_rate, waits)
    for _ in range(_NUM_ITERATIONS):
        ways = [(formula.way(point.round_trip_ms), point.ms_per_token) for point in points]
        # Minimise the sum of (s * ones[i] + waiting[i] - 1) ** 2.
        ones = [rounds / measured for (rounds, _), measured in ways]
        waiting = [waiting_ms / measured for (_, waiting_ms), measured in ways]
        squares = sum(one * one for one in ones)
        round_ms = sum(one * (1 - wait) for one, wait in zip(ones, waiting, strict=True)) / squares
        formula = replace(formula, round_ms=round_ms)
    return formula


def _wait_overhead_ms(points: Sequence[Point]) -> float:
    """d: the mean waiting time minus the round trip; 0 if no round waited."""
    num_waits = sum(point.waits for point in points)
    waited_ms = sum(point.waited_ms - point.waits * point.round_trip_ms for point in points)
    return max(0.0, waited_ms / num_waits) if num_waits else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
