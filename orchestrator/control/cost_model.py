"""What rounds cost: curves of the target's passes and of the draft, and the overhead around them.

Knows durations and counts; does not know tokens or how many to draft (orchestrator/control/draft_length.py).
"""

from __future__ import annotations

import bisect
import operator
import statistics
from collections import deque
from dataclasses import dataclass

from orchestrator.rounds import RoundRecord, Source

GAIN = 0.1
"""Share of a new value in the moving averages."""

NOISE, DRIFT = 0.05, 0.005
"""Relative standard deviations: of one measurement, and of a coefficient's change between two of them."""

ACCIDENT = 0.25
"""A measurement that is slower than the median of the last three by more than this share is ignored."""

ALIKE, MEMORY = 0.1, 512
"""Measurements at x that differ by no larger share are one point, which is forgotten after so many others."""

MAX_ROWS = 65
"""Rows of a sequence in a pass; more are a prompt's."""

DEADLINES, DEADLINE_PASSES, MIN_DEADLINE_S = 4.0, 8, 0.05
"""A draft is late after so many times its usual time; an event loop may be busy for MIN_DEADLINE_S."""

_X = operator.attrgetter("x")


@dataclass(slots=True)
class _Point:
    """What was measured of late near ``x``."""

    x: float
    seconds: float
    at: int  # number of its last measurement
    num_measured: int = 1


class Curve:
    """Seconds by x: a line, by least squares that forget (a Kalman filter of its two coefficients), bent through what
    was measured of late: passes have knees and steps."""

    def __init__(self, fixed_share: float) -> None:
        """``fixed_share``: of the first measurement, while nothing tells how it depends on x."""
        self._fixed_share = fixed_share
        self.fixed = self.slope = 0.0
        self._covariance = (0.0, 0.0, 0.0)  # of (fixed, fixed), (fixed, slope), (slope, slope)
        self._ratios: deque[float] = deque(maxlen=3)  # measured over expected
        self._points: list[_Point] = []  # by x
        self._num_measured = 0
        self._cache: dict[float, float] = {}

    @property
    def known(self) -> bool:
        return bool(self._ratios)

    def __call__(self, x: float) -> float:
        if x not in self._cache:
            self._cache[x] = self._bent(x)
        return self._cache[x]

    def _bent(self, x: float) -> float:
        """Between two points as the straight line between them, elsewhere parallel to the line."""
        index = bisect.bisect(self._points, x, key=_X)
        near = self._points[max(0, index - 1) : index + 1]
        bends = [self._bend_at(point) for point in near]
        share = (x - near[0].x) / (near[1].x - near[0].x) if len(near) == 2 else 0.0
        return max(1e-9, self._line(x) + (bends[0] + share * (bends[-1] - bends[0]) if bends else 0.0))

    def measured(self, x: float) -> bool:
        """Whether it was measured of late at ``x``."""
        return any(abs(point.x - x) <= ALIKE * x for point in self._points)

    def _bend_at(self, point: _Point) -> float:
        """How far the point is from the line, without what may be noise."""
        bend, noise = point.seconds - self._line(point.x), 2 * NOISE * point.seconds
        return bend * max(0.0, 1 - noise**2 / max(1e-18, point.num_measured * bend**2))

    def _line(self, x: float) -> float:
        return self.fixed + self.slope * x

    def observe(self, x: float, seconds: float, usual: bool = True) -> None:
        """``usual``: it is like those that will follow, so that the curve is bent through it."""
        unit, expected = max(x, 1.0), max(1e-9, self(x))
        self._cache.clear()
        self._num_measured += 1
        if not self.known or seconds < expected / 2:  # nothing is that fast by accident: what was known is out of date
            self.fixed, self.slope = self._fixed_share * seconds, (1 - self._fixed_share) * seconds / unit
            self._covariance = seconds**2, 0.0, (seconds / unit) ** 2
            self._ratios.append(1.0)
            self._points = [_Point(x, seconds, self._num_measured)]
            return
        self._ratios.append(seconds / expected)
        if seconds <= (1 + ACCIDENT) * expected * statistics.median(self._ratios):
            self._fit(x, seconds)
            if usual:
                self._bend(x, seconds)

    def _fit(self, x: float, seconds: float) -> None:
        unit, expected = max(x, 1.0), max(1e-9, self._line(x))
        error = seconds - expected
        a, b, c = self._covariance
        a, c = a + (DRIFT * expected) ** 2, c + (DRIFT * expected / unit) ** 2
        with_fixed, with_slope = a + b * x, b + c * x
        total = with_fixed + with_slope * x + (NOISE * expected) ** 2
        gain, gain_slope = with_fixed / total, with_slope / total
        self.fixed, self.slope = self.fixed + gain * error, self.slope + gain_slope * error
        self._covariance = a - gain * with_fixed, b - gain * with_slope, c - gain_slope * with_slope
        if self.slope < 0:  # more never takes less
            self.fixed, self.slope = max(0.0, self._line(x)), 0.0
        elif self.fixed < 0:
            self.fixed, self.slope = 0.0, max(0.0, self._line(x)) / unit

    def _bend(self, x: float, seconds: float) -> None:
        self._points = [point for point in self._points if self._num_measured - point.at <= MEMORY]
        point = min(self._points, key=lambda point: abs(point.x - x), default=None)
        if point is None or abs(point.x - x) > ALIKE * x:
            bisect.insort(self._points, _Point(x, seconds, self._num_measured), key=_X)
            return
        point.num_measured += 1
        gain = max(GAIN, 1 / point.num_measured)
        point.x += gain * (x - point.x)
        point.seconds += gain * (seconds - point.seconds)
        point.at = self._num_measured


class CostModel:
    """Shared by all sequences of one orchestrator. Durations in seconds."""

    def __init__(self) -> None:
        self._target, self._draft = Curve(0.9), Curve(0.5)
        self._last_pass = (0, 0)
        self.overhead_s = 0.0
        """Of a round, outside the target's queue and pass."""
        self.hit_rate = 0.5
        """Share of the requests to a draft that grows ahead that found a tree."""
        self.rows_per_token = 1.0
        """Rows of a draft token that was waited for, with its siblings."""
        self.num_live = 1
        """Sequences that share the target."""

    @property
    def target_known(self) -> bool:
        return self._target.known

    @property
    def known(self) -> bool:
        return self._target.known and self._draft.known

    def target_s(self, rows: float) -> float:
        """A pass."""
        return self._target(rows)

    def draft_s(self, num_tokens: int) -> float:
        """From the request for draft tokens to their arrival."""
        return self._draft(num_tokens) if num_tokens else 0.0

    @property
    def alone_s(self) -> float:
        """A pass in which all sequences decode autonomously."""
        return self.target_s(self.num_live)

    def round_s(self, num_nodes: float) -> float:
        """A round in which all sequences verify so many nodes that are there."""
        return self.overhead_s + self.target_s(self.num_live * (num_nodes + 1))

    def round_measured(self, num_nodes: float) -> bool:
        return self._target.measured(self.num_live * (num_nodes + 1))

    def deadline_s(self, num_tokens: int) -> float:
        """How long ``num_tokens`` are worth waiting for: DEADLINE_PASSES of the target at most, or as many as give so
        many tokens without a draft."""
        if not self.target_known:
            return 1.0
        usual_s = DEADLINES * self.draft_s(num_tokens) if self.known else 2 * self.alone_s
        return max(MIN_DEADLINE_S, min(usual_s, max(DEADLINE_PASSES, num_tokens) * self.alone_s))

    def of_one_s(self, num_tokens: int, seconds: float) -> float:
        """The time of one draft token, for a draft that took ``seconds`` for ``num_tokens``. Needs an answer before."""
        return seconds * self.draft_s(1) / max(1e-9, self.draft_s(num_tokens))

    def observe(self, record: RoundRecord) -> None:
        """A round has ended."""
        drafting, timings = record.drafting, record.timings
        if drafting.answer is not None:
            self._draft.observe(*drafting.answer)
        if not record.number:
            return  # an open's pass contains a prefill
        self.num_live = max(1, record.exchange.num_live, timings.sequences)
        this_pass = timings.pass_us, timings.rows
        # All sequences of a pass report it.
        if (
            this_pass != self._last_pass or timings.sequences == 1
        ) and 0 < timings.rows <= MAX_ROWS * timings.sequences:
            self._last_pass = this_pass
            # Where some sequences are absent, the draft may be busy with them, and slow the pass down.
            self._target.observe(timings.rows, max(1e-6, record.pass_s), usual=timings.sequences >= self.num_live)
        if drafting.arrived is not None:
            self.hit_rate += GAIN * (drafting.arrived - self.hit_rate)
        if record.exchange.round_trip_s is not None:
            overhead_s = max(0.0, record.exchange.round_trip_s - timings.queue_us / 1e6 - record.pass_s)
            self.overhead_s += GAIN * (min(overhead_s, 2 * self.overhead_s + 1e-3) - self.overhead_s)
        if record.source is Source.DRAFT and drafting.num_asked:
            rows = record.num_nodes / (1 + max(record.verified_tree.depths))
            self.rows_per_token += GAIN * (rows - self.rows_per_token)
