"""The batching delay: how long the next pass of a target waits for sequences that are about to return.

A sequence that returns during a pass has to wait for the next one. The sequences can therefore split into two halves
that alternate forever, each waiting for the other's pass. A short delay is better if a pass takes about as long for all
sequences as for half of them. The present ones lose the delay once, the returning ones save the rest of a pass, and
from then on all of them leave and return together. If drafting for absent sequences shares the target's device, a pass
without such drafting is shorter, too. Knows clocks and keys; does not know what a round is.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_LATE, _SOON = 1.5, 0.25
"""Shares of a sequence's usual absence: after _LATE of it the target no longer waits for the sequence; until then the
expected rest of the absence is at least _SOON of it."""

_ROUNDS_TOGETHER, _MAX_ROUND_RATIO = 8, 0.9
"""Sequences of one pass are assumed to stay together for _ROUNDS_TOGETHER rounds. Joining two halves must shorten a
round to _MAX_ROUND_RATIO of it or less."""

_AWAY_GAIN = 0.25
_PASS_GAIN = 1 / 64
"""Weights of a new value in the moving averages, of absences and of passes."""

_MIN_PASS_S = 1e-3
"""Passes with a shorter fixed time are not delayed. It is also the shortest expected pass time."""

_NUM_RECENT, _NOISE = 5, 0.05
"""The logarithm of the slowdown by drafting is the median of _NUM_RECENT measurements, less _NOISE. With the median a
single slow pass has no effect."""

_FADE = 1 / 2048
"""Share of that logarithm forgotten per pass without drafting, which does not measure it. The share is small, because
services rarely change devices, a needless delay costs little, and a new measurement costs much."""


@dataclass(slots=True)
class _SequenceTimes:
    left_at: float | None = None  # the time of its last verdict; None while it is present
    away_s: float | None = None  # usual time from a verdict to the next round
    beside_pass: bool = False  # whether away_s is for drafting during a pass, where both slow each other down equally
    num_rows: int = 1  # of its last round


class Gathering:
    """Computes the batching delay of one target. ``now`` is any monotonic clock in seconds."""

    def __init__(self) -> None:
        self._sequences: dict[Hashable, _SequenceTimes] = {}
        self._away_s: float | None = None  # usual absence over all sequences
        self._weight = 0.0
        # Moving averages over passes: rows, seconds, and the moments for a linear fit of seconds over rows.
        self._rows = self._pass_s = self._rows_squared = self._product = 0.0
        self._log_slowdown = 0.0  # logarithm of the ratio by which concurrent drafting lengthens passes
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)  # measurements of that logarithm
        self._began = -math.inf  # start of the last pass

    def told(self, key: Hashable, num_rows: int, now: float) -> None:
        """A verdict of ``key`` on ``num_rows`` rows was sent. The sequence is away until its next round arrives."""
        known = self._sequences.setdefault(key, _SequenceTimes())
        known.left_at, known.num_rows = now, num_rows

    def back(self, key: Hashable, now: float) -> None:
        known = self._sequences.setdefault(key, _SequenceTimes())
        if known.left_at is not None:
            away_s = now - known.left_at
            beside_pass = known.num_rows > 1 and known.left_at <= self._began < now
            known.away_s = _average(known.away_s if known.beside_pass is beside_pass else None, away_s)
            known.beside_pass, known.left_at = beside_pass, None
            self._away_s = _average(self._away_s, self._usual_s(known) or away_s)

    def gone(self, key: Hashable) -> None:
        self._sequences.pop(key, None)

    def passed(self, rows: int, seconds: float, began: float) -> None:
        """A pass with ``rows`` rows took ``seconds``. Sequences that were away when it ``began`` are not back yet."""
        self._began = began
        if _any_draft(self._away(began)):
            if seconds > 0 and self._weight:
                self._recent.append(math.log(seconds / self._expected_s(rows)))
                if len(self._recent) == _NUM_RECENT:
                    self._log_slowdown = max(0.0, statistics.median(self._recent) - _NOISE)
            seconds /= self._slowdown
        else:
            self._log_slowdown *= 1 - _FADE
        gain = max(_PASS_GAIN, 1 / (self._weight + 1))
        self._weight += 1
        self._rows += gain * (rows - self._rows)
        self._pass_s += gain * (seconds - self._pass_s)
        self._rows_squared += gain * (rows * rows - self._rows_squared)
        self._product += gain * (rows * seconds - self._product)

    @property
    def fixed_s(self) -> float:
        """The time of a pass that does not depend on its rows; the whole time if all passes had equally many rows."""
        return min(max(0.0, self._pass_s - self._slope_s * self._rows), self._pass_s)

    @property
    def _slope_s(self) -> float:
        spread = self._rows_squared - self._rows * self._rows
        if spread <= 1e-3 * self._rows_squared:
            return 0.0
        return max(0.0, (self._product - self._rows * self._pass_s) / spread)

    def _expected_s(self, rows: float) -> float:
        return max(_MIN_PASS_S, self.fixed_s + self._slope_s * rows)

    @property
    def _slowdown(self) -> float:
        return math.exp(self._log_slowdown)

    def rest_s(self, num_here: int, num_leaving: int, num_rows: int, now: float) -> float:
        """The delay before the next pass; 0 for none. ``num_here`` present sequences with ``num_rows`` rows could join
        it. ``num_leaving`` of them go away after it; the others (autonomous decoding, prefill) are in every pass."""
        fixed_s = self.fixed_s
        if fixed_s < _MIN_PASS_S:
            return 0.0
        away = self._away(now)
        slowdown = self._slowdown if _any_draft(away) else 1.0
        slowdown_s = (slowdown - 1) * self._expected_s(num_rows)  # if the pass begins now
        spared_s = slowdown_s / max(1, len(away))  # for each sequence that returns before the pass
        waits = sorted(
            (max(usual - by_now, _SOON * usual), usual, rows)
            for usual, by_now, rows in away
            if usual <= fixed_s + slowdown_s
        )
        best_s = most_saved = 0.0
        rows_awaited = 0
        for count, (wait_s, usual_s, rows) in enumerate(waits, 1):
            rows_awaited += rows
            # A returning sequence saves the fixed time of a pass less the wait, a present one loses the wait. Both save
            # the slowdown by the drafts that are finished by then.
            saved = count * (fixed_s + count * spared_s - wait_s) + num_here * (count * spared_s - wait_s)
            if num_leaving:
                each_s = self._spared_later_s(num_rows, rows_awaited, usual_s, slowdown)
                saved += _ROUNDS_TOGETHER * (num_leaving + count) * each_s
            if saved > most_saved:
                best_s, most_saved = wait_s, saved
        return best_s

    def _spared_later_s(self, num_rows: int, rows_awaited: int, usual_s: float, slowdown: float) -> float:
        """Seconds that each sequence saves per later round if the present and the awaited ones share every pass.

        Otherwise they alternate, and passes and absences (``usual_s``) last ``slowdown`` times as long.
        """
        here_s, awaited_s = (slowdown * self._expected_s(rows) for rows in (num_rows, rows_awaited))
        apart_s = max(here_s + awaited_s, here_s + slowdown * usual_s)
        together_s = self._expected_s(num_rows + rows_awaited) + usual_s
        return apart_s - together_s if together_s < _MAX_ROUND_RATIO * apart_s else 0.0

    def _away(self, now: float) -> list[tuple[float, float, int]]:
        """(usual absence, absence so far, rows of the last round) of sequences that are expected back. Overdue ones are
        left out: their clients do not read or have gone."""
        found = []
        for known in self._sequences.values():
            usual_s = self._usual_s(known)
            if known.left_at is None or usual_s is None:
                continue
            if now - known.left_at < _LATE * usual_s * (self._slowdown if known.num_rows > 1 else 1.0):
                found.append((usual_s, now - known.left_at, known.num_rows))
        return found

    def _usual_s(self, known: _SequenceTimes) -> float | None:
        """The usual absence of a sequence when no pass runs meanwhile; None before any sequence was away."""
        if known.away_s is None:
            return self._away_s  # many sequences start together and behave alike
        return known.away_s / self._slowdown if known.beside_pass else known.away_s


def _any_draft(away: Sequence[tuple[float, float, int]]) -> bool:
    """Whether a sequence had more than one row in its last round, so that a draft is working for it."""
    return any(num_rows > 1 for _, _, num_rows in away)


def _average(usual_s: float | None, now_s: float) -> float:
    return now_s if usual_s is None else usual_s + _AWAY_GAIN * (now_s - usual_s)
