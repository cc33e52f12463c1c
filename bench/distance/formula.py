"""What a token costs at a distance, by one formula for every mode; fitted on some distances, it predicts another.

Milliseconds per token at a round trip of r ms to the draft, of rounds that take s ms beside what they wait for:

    waiting:       (s + w (r + d)) / E
    going alone:   s (1 + (1 - h) n) / (E + (1 - h) n)

E tokens come of a round with a draft; w is the share of these after which the next one's draft is missing and awaited:

- none where the target is alone (E = 1); all where so many draft tokens are always asked for (d, its steps, is a part
  of s);
- where the controller chooses how many, those that were seen to wait, whatever the distance: in the others it had
  guesses from the text, or went without;
- where it grows ahead, those whose verdict was not foreseen. After a round that waited for its tree, what is grown
  ahead comes right behind that tree, from however far: the verdict is foreseen with chance h. After a round that did
  not wait, the draft first has to hear of it. While r is within a pass that is in time, and w = 1 - h. Beyond it is
  too late: no two verdicts in a row are foreseen, and w = 1 / (1 + h).

Ahead, the controller waits for what is missing or goes on alone, whichever is faster; so does the formula. Alone, each
round gives a token. What the draft grows below one comes m rounds later, m = 1 within a pass, and counts if all m
tokens since are among it, each with chance g: n = m - 1 + 1 / g^m rounds until then. By then the draft is m rounds
deep, so that its next trees are foreseen with chance h from however far.

Measured, not fitted, are E, h (the share of foreseen verdicts at distances within a pass), g (the share of drafts whose
first token is right), the pass as the target tells it, d (what a wait took beside r), and w where it is seen. s is
fitted by least squares of the relative error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from bench.distance.modes import ADAPTIVE, AHEAD, ALONE
from bench.distance.row import Row

FITTED_MS = (0.0, 1.0, 5.0, 50.0)
PREDICTED_MS = 20.0

_STEPS = 20
"""Whether to wait depends on s, and s on that; it settles within a few."""


@dataclass(frozen=True, slots=True)
class Point:
    """What was measured at one distance. ``hits`` is the share of foreseen verdicts, ``firsts`` that of drafts whose
    first token was right; of all rounds ``waits`` is the share that waited for the draft, ``waited_ms`` how long a
    round waited on average."""

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
        # Going alone is a round, too, so what a round with a draft gives is not what rounds give on average.
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
    """s, h, E, d, g and w of the module's docstring, and the pass; ``hit_rate`` is None where nothing grows ahead, and
    ``waits`` counts there alone."""

    round_ms: float
    hit_rate: float | None
    tokens_per_round: float
    pass_ms: float
    wait_ms: float = 0.0
    first_rate: float = 0.0
    waits: float = 0.0

    def missing(self, round_trip_ms: float) -> float:
        """w: the share of rounds that wait for the draft, where they do."""
        if self.hit_rate is None:
            return self.waits
        return 1 - self.hit_rate if round_trip_ms <= self.pass_ms else 1 / (1 + self.hit_rate)

    def ms_per_token(self, round_trip_ms: float) -> float:
        rounds, waiting_ms = self.way(round_trip_ms)
        return rounds * self.round_ms + waiting_ms

    def way(self, round_trip_ms: float) -> tuple[float, float]:
        """Of waiting and going alone the faster one: rounds and milliseconds of waiting per token."""
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
    return _fitted(points)


def synchronous(points: Sequence[Point]) -> Formula:
    """Of a draft that is waited for in every round."""
    return _fitted(points, waits=1.0)


def adaptive(points: Sequence[Point]) -> Formula:
    """Of a draft that is waited for where it pays."""
    return _fitted(points, wait_ms=_beside_trips_ms(points), waits=_mean([point.waits for point in points]))


def ahead(points: Sequence[Point]) -> Formula:
    """Of a draft that grows ahead. Some point must be within a pass."""
    pass_ms = _mean([point.pass_ms for point in points])
    # Who never waited was never faster that way.
    wait_ms = _beside_trips_ms(points) if any(point.waits for point in points) else float("inf")
    hit_rate = _mean([point.hits for point in points if point.round_trip_ms <= pass_ms])
    return _fitted(points, hit_rate, wait_ms, _mean([point.firsts for point in points]))


def predictions(rows: Sequence[Row]) -> list[Prediction]:
    """Of every mode that was measured at all distances."""
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
    """The best s."""
    pass_ms = _mean([point.pass_ms for point in points])
    tokens_per_round = _mean([point.tokens_per_round for point in points])
    formula = Formula(pass_ms, hit_rate, tokens_per_round, pass_ms, wait_ms, first_rate, waits)
    for _ in range(_STEPS):
        ways = [(formula.way(point.round_trip_ms), point.ms_per_token) for point in points]
        # s * ones[i] + waiting[i] is to be 1.
        ones = [rounds / measured for (rounds, _), measured in ways]
        waiting = [waiting_ms / measured for (_, waiting_ms), measured in ways]
        squares = sum(one * one for one in ones)
        round_ms = sum(one * (1 - wait) for one, wait in zip(ones, waiting, strict=True)) / squares
        formula = replace(formula, round_ms=round_ms)
    return formula


def _beside_trips_ms(points: Sequence[Point]) -> float:
    """d: what a wait took beside the way; 0 where nobody waited."""
    num_waits = sum(point.waits for point in points)
    waited_ms = sum(point.waited_ms - point.waits * point.round_trip_ms for point in points)
    return max(0.0, waited_ms / num_waits) if num_waits else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
