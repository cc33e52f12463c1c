"""What rounds cost: a linear model of the target's passes and of the draft, and the overhead around them.

Knows durations and counts; does not know tokens or how many to draft (orchestrator/control/draft_length.py).
"""

from __future__ import annotations

import statistics
from collections import deque

from orchestrator.rounds import RoundRecord, Source

GAIN = 0.1
"""Share of a new value in the moving averages."""

NOISE, DRIFT = 0.05, 0.005
"""Relative standard deviations: of one measurement, and of a coefficient's change between two of them."""

ACCIDENT = 0.25
"""A measurement that is slower than the median of the last three by more than this share is ignored."""

MAX_ROWS = 65
"""Rows of a sequence in a pass; more are a prompt's."""

DEADLINES, DEADLINE_PASSES, MIN_DEADLINE_S = 4.0, 8, 0.05
"""A draft is late after so many times its usual time; an event loop may be busy for MIN_DEADLINE_S."""


class Line:
    """``fixed + slope x`` in seconds, by least squares that forget: a Kalman filter of the two coefficients."""

    def __init__(self, fixed_share: float) -> None:
        """``fixed_share``: of the first measurement, while nothing tells how it depends on x."""
        self._fixed_share = fixed_share
        self.fixed = self.slope = 0.0
        self._covariance = (0.0, 0.0, 0.0)  # of (fixed, fixed), (fixed, slope), (slope, slope)
        self._ratios: deque[float] = deque(maxlen=3)  # measured over expected

    @property
    def known(self) -> bool:
        return bool(self._ratios)

    def __call__(self, x: float) -> float:
        return self.fixed + self.slope * x

    def observe(self, x: float, seconds: float) -> None:
        unit, expected = max(x, 1.0), max(1e-9, self(x))
        if not self.known or seconds < expected / 2:  # nothing is that fast by accident: what was known is out of date
            self.fixed, self.slope = self._fixed_share * seconds, (1 - self._fixed_share) * seconds / unit
            self._covariance = seconds**2, 0.0, (seconds / unit) ** 2
            self._ratios.append(1.0)
            return
        self._ratios.append(seconds / expected)
        if seconds > (1 + ACCIDENT) * expected * statistics.median(self._ratios):
            return
        error = seconds - expected
        a, b, c = self._covariance
        a, c = a + (DRIFT * expected) ** 2, c + (DRIFT * expected / unit) ** 2
        with_fixed, with_slope = a + b * x, b + c * x
        total = with_fixed + with_slope * x + (NOISE * expected) ** 2
        gain, gain_slope = with_fixed / total, with_slope / total
        self.fixed, self.slope = self.fixed + gain * error, self.slope + gain_slope * error
        self._covariance = a - gain * with_fixed, b - gain * with_slope, c - gain_slope * with_slope
        if self.slope < 0:  # more never takes less
            self.fixed, self.slope = max(0.0, self(x)), 0.0
        elif self.fixed < 0:
            self.fixed, self.slope = 0.0, max(0.0, self(x)) / unit


class CostModel:
    """Shared by all sequences of one orchestrator. Durations in seconds."""

    def __init__(self) -> None:
        self._target, self._draft = Line(0.9), Line(0.5)
        self._alone_s, self._alone_rows = 0.0, 0
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
        """A pass in which all sequences decode autonomously: as measured under this load, else by the line. While all
        draft, the line knows only passes with many rows, and extends badly to few."""
        return self._alone_s if self._alone_rows == self.num_live else self.target_s(self.num_live)

    def round_s(self, num_nodes: float) -> float:
        """A round in which all sequences verify so many nodes that are there."""
        return self.overhead_s + self.target_s(self.num_live * (num_nodes + 1))

    @property
    def min_chance(self) -> float:
        """A draft token that is accepted less often never pays for its row: others of the pass are faster by more. The
        target must be known."""
        return self._target.slope * self.num_live / max(1e-9, self.alone_s)

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

    def observe(self, record: RoundRecord, alone: bool = True) -> None:
        """A round has ended. ``alone``: no sequence drafts, so that no draft slows the pass down."""
        drafting, timings = record.drafting, record.timings
        if drafting.answer is not None:
            self._draft.observe(*drafting.answer)
        if not record.number:
            return  # an open's pass contains a prefill
        self.num_live = max(1, record.exchange.num_live, timings.sequences)
        self._passed(timings.rows, timings.sequences, max(1e-6, record.pass_s), alone)
        if drafting.arrived is not None:
            self.hit_rate += GAIN * (drafting.arrived - self.hit_rate)
        if record.exchange.round_trip_s is not None:
            overhead_s = max(0.0, record.exchange.round_trip_s - timings.queue_us / 1e6 - record.pass_s)
            self.overhead_s += GAIN * (min(overhead_s, 2 * self.overhead_s + 1e-3) - self.overhead_s)
        if record.source is Source.DRAFT and drafting.num_asked:
            rows = record.num_nodes / (1 + max(record.verified_tree.depths))
            self.rows_per_token += GAIN * (rows - self.rows_per_token)

    def _passed(self, rows: int, num_sequences: int, seconds: float, alone: bool) -> None:
        if not 0 < rows <= MAX_ROWS * num_sequences:
            return
        self._target.observe(rows, seconds)
        if alone and rows == self.num_live:
            usual_s = self._alone_s if self._alone_rows == rows else seconds
            self._alone_s, self._alone_rows = usual_s + GAIN * (min(seconds, 2 * usual_s) - usual_s), rows
