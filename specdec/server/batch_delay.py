"""The batch delay of a target: how long its next pass waits for sequences that are about to return.

A sequence that returns during a pass has to wait for the next one. Sequences can therefore split into two halves that
alternate forever, although one pass takes about as long for all of them as for half of them. A short delay lets them
share a pass, and from then on they leave together. Knows clocks and keys; does not know what a round is.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable
from operator import itemgetter

_ABSENCE_GAIN = 0.25
"""Weight of a new absence in a sequence's average. Large, because the length of its drafts changes within seconds."""

_PASS_GAIN = 1 / 64
"""Weight of a new pass in their averages. Small, because a fit needs passes with different numbers of rows."""

_LATE = 1.25
"""A sequence is waited for until this multiple of its usual absence; absences vary by less than a quarter."""

_MAX_SHARE = 0.9
"""The cap: the delays before one pass are together at most this share of the fixed time of a pass."""

_PATIENT = 8
"""Weight of the wait of a sequence that is in every pass: it gains nothing, pass after pass. 2 would be right if who
misses a pass missed every second one; simulated, a draft on the target's device then makes 0.94 of the target alone."""

_MIN_FIXED_S = 1e-3
"""Passes with a shorter fixed time are not delayed: timers are no more exact."""


class BatchDelay:
    """Computes the batch delay of one target. ``now`` is any monotonic clock in seconds."""

    def __init__(self) -> None:
        self._absent_since: dict[Hashable, float] = {}
        self._absence_s: dict[Hashable, float] = {}  # usual time from a verdict to the next round
        self._could_begin = math.inf  # the time at which the next pass could have begun
        self._gain = 1.0  # of the moving averages over passes, for a linear fit of seconds over rows
        self._rows = self._pass_s = self._variance = self._covariance = 0.0

    def left(self, key: Hashable, now: float) -> None:
        """A verdict was sent. The sequence is absent until its next round arrives."""
        self._absent_since[key] = now

    def returned(self, key: Hashable, now: float) -> None:
        if (since := self._absent_since.pop(key, None)) is not None:
            usual_s = self._absence_s.get(key, now - since)
            self._absence_s[key] = usual_s + _ABSENCE_GAIN * (now - since - usual_s)

    def removed(self, key: Hashable) -> None:
        self._absent_since.pop(key, None)
        self._absence_s.pop(key, None)

    def observe_pass(self, rows: int, seconds: float) -> None:
        self._could_begin = math.inf
        rows_off, seconds_off = rows - self._rows, seconds - self._pass_s
        self._rows += self._gain * rows_off
        self._pass_s += self._gain * seconds_off
        self._variance += self._gain * ((1 - self._gain) * rows_off * rows_off - self._variance)
        self._covariance += self._gain * ((1 - self._gain) * rows_off * seconds_off - self._covariance)
        self._gain = max(_PASS_GAIN, self._gain / (1 + self._gain))

    @property
    def fixed_s(self) -> float:
        """The time of a pass that does not depend on its rows; the whole time if all passes had equally many rows."""
        if not self._covariance > 0:
            return self._pass_s
        variance = self._variance + 1e-3 * self._rows**2  # equally large passes do not show what rows cost
        return max(0.0, self._pass_s - self._rows * self._covariance / variance)

    def delay_s(
        self, num_here: int, num_leaving: int, now: float, ignored: Collection[Hashable] = frozenset()
    ) -> float:
        """The delay before the next pass; 0 for none. ``num_here`` sequences could join it, and ``num_leaving`` of them
        become absent after it; the others (autonomous decoding, prefill) are in every pass. ``ignored``: sequences that
        are not waited for."""
        fixed_s = self.fixed_s
        if fixed_s < _MIN_FIXED_S:
            return 0.0
        self._could_begin = min(self._could_begin, now)
        longest_s = self._could_begin + _MAX_SHARE * fixed_s - now
        returning = (
            max(since + self._absence_s[key] - now, 0.25 * self._absence_s[key])
            for key, since in self._absent_since.items()
            if self._absence_s.get(key, fixed_s) < fixed_s and now < since + _LATE * self._absence_s[key]
            if key not in ignored
        )
        num_staying = num_here - num_leaving
        waits = enumerate(sorted(s for s in returning if 0 < s <= longest_s), 1)
        # Sequences that return or leave save a pass in which they have no part, and lose the wait.
        saved = ((s, (num_leaving + m) * (fixed_s - s) - _PATIENT * num_staying * s) for m, s in waits)
        return max(((0.0, 0.0), *saved), key=itemgetter(1))[0]
