"""When a pass begins: at once, or as soon as those are back who are about to be.

Sequences that come back while others are in a pass join the next one, and so two halves can take turns for ever, each
waiting for the other's pass. Where a pass takes about as long for all of them as for half, it is better to wait a
little: those who are here lose that once, those who come back meanwhile are spared the rest of a pass, and from then on
they are away and back together. And where the drafts of those who are away take time from the same device, a pass
without them is shorter. Knows clocks and keys; refuses to know what a round is.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_LATE, _SOON = 1.5, 0.25
"""Who takes so many times what it takes as a rule is not waited for any longer; whoever is late only by less is
expected within so much of it."""

_TOGETHER, _BETTER = 8, 0.9
"""Rounds for which those who are in one pass stay together; and where they had better be: where a round then takes no
more than this share of one in two halves."""

_GAIN = 0.25
_MEMORY = 1 / 64
"""Share of what is known of passes that each new one replaces."""

_LEAST_S = 1e-3
"""Less is not worth a look."""

_NUM_RECENT, _NOISE = 5, 0.05
"""One pass that is slow is an accident, of so many the middle one is not. A smaller logarithm of a ratio is no news."""

_FADE = 1 / 2048
"""What those who are away cost is not measured while they are waited for, and may change: a pass forgets so much. They
share a device as a rule, or do not; to wait for them in vain costs little, and to learn it once more much."""


@dataclass(slots=True)
class _Known:
    """Of one sequence. ``told`` is when its last verdict went out, None while it is here."""

    told: float | None = None
    away_s: float | None = None  # as a rule, from a verdict to the next round
    beside: bool = False  # a pass, which its draft slows down, and which slows down its draft as much
    num_rows: int = 1  # of its last round


class Gathering:
    """``now`` is any clock in seconds that never goes back."""

    def __init__(self) -> None:
        self._sequences: dict[Hashable, _Known] = {}
        self._away_s: float | None = None  # of any sequence, as a rule
        self._weight = 0.0
        # Moving averages over passes: rows, seconds, and the moments that give the line through them.
        self._rows = self._pass_s = self._rows_squared = self._product = 0.0
        self._log_slower = 0.0  # how many times longer passes are while some are away for their drafts
        self._recent: deque[float] = deque(maxlen=_NUM_RECENT)  # measurements of that
        self._began = -math.inf  # the last pass

    def told(self, key: Hashable, num_rows: int, now: float) -> None:
        """The verdict of ``key`` on so many rows is out; nothing is to be done for it until it is back."""
        known = self._sequences.setdefault(key, _Known())
        known.told, known.num_rows = now, num_rows

    def back(self, key: Hashable, now: float) -> None:
        known = self._sequences.setdefault(key, _Known())
        if known.told is not None:
            away_s = now - known.told
            beside = known.num_rows > 1 and known.told <= self._began < now
            known.away_s = _moved(known.away_s if known.beside is beside else None, away_s)
            known.beside, known.told = beside, None
            self._away_s = _moved(self._away_s, self._usual_s(known) or away_s)

    def gone(self, key: Hashable) -> None:
        self._sequences.pop(key, None)

    def passed(self, rows: int, seconds: float, began: float) -> None:
        """A pass of so many rows took so long. Who was away when it ``began`` is not back yet."""
        self._began = began
        if _drafts(self._away(began)):
            if seconds > 0 and self._weight:
                self._recent.append(math.log(seconds / self._expected_s(rows)))
                if len(self._recent) == _NUM_RECENT:
                    self._log_slower = max(0.0, statistics.median(self._recent) - _NOISE)
            seconds /= self._slower
        else:
            self._log_slower *= 1 - _FADE
        gain = max(_MEMORY, 1 / (self._weight + 1))
        self._weight += 1
        self._rows += gain * (rows - self._rows)
        self._pass_s += gain * (seconds - self._pass_s)
        self._rows_squared += gain * (rows * rows - self._rows_squared)
        self._product += gain * (rows * seconds - self._product)

    @property
    def fixed_s(self) -> float:
        """What a pass costs however few its rows. Where all passes were alike: what they took."""
        return min(max(0.0, self._pass_s - self._slope_s * self._rows), self._pass_s)

    @property
    def _slope_s(self) -> float:
        spread = self._rows_squared - self._rows * self._rows
        if spread <= 1e-3 * self._rows_squared:
            return 0.0
        return max(0.0, (self._product - self._rows * self._pass_s) / spread)

    def _expected_s(self, rows: float) -> float:
        return max(_LEAST_S, self.fixed_s + self._slope_s * rows)

    @property
    def _slower(self) -> float:
        return math.exp(self._log_slower)

    def rest_s(self, num_here: int, num_leaving: int, num_rows: int, now: float) -> float:
        """How long the next pass had better wait with ``num_here`` sequences that could be in it, with so many rows; 0:
        no longer. ``num_leaving`` of them are away after it; the others are in every pass."""
        fixed_s = self.fixed_s
        if fixed_s < _LEAST_S:
            return 0.0
        away = self._away(now)
        slower = self._slower if _drafts(away) else 1.0
        slower_s = (slower - 1) * self._expected_s(num_rows)  # if it begins now
        spared_s = slower_s / max(1, len(away))  # by each who is awaited
        waits = sorted(
            (max(usual - by_now, _SOON * usual), usual, rows)
            for usual, by_now, rows in away
            if usual <= fixed_s + slower_s
        )
        best_s = most_saved = 0.0
        rows_awaited = 0
        for count, (wait_s, usual_s, rows) in enumerate(waits, 1):
            rows_awaited += rows
            # Each of those who come is spared what is left of the pass by then, but for its rows; each who is here
            # waits. Both are spared what it takes longer while they are away.
            saved = count * (fixed_s + count * spared_s - wait_s) + num_here * (count * spared_s - wait_s)
            if num_leaving:
                each_s = self._spared_later_s(num_rows, rows_awaited, usual_s, slower)
                saved += _TOGETHER * (num_leaving + count) * each_s
            if saved > most_saved:
                best_s, most_saved = wait_s, saved
        return best_s

    def _spared_later_s(self, num_rows: int, rows_awaited: int, usual_s: float, slower: float) -> float:
        """By each of them in every later round, if those who are here and those who are awaited, who are away for
        ``usual_s`` as a rule, are in one pass from now on; else they take turns, and passes and drafts are so many
        times ``slower``."""
        here_s, awaited_s = (slower * self._expected_s(rows) for rows in (num_rows, rows_awaited))
        apart_s = max(here_s + awaited_s, here_s + slower * usual_s)
        together_s = self._expected_s(num_rows + rows_awaited) + usual_s
        return apart_s - together_s if together_s < _BETTER * apart_s else 0.0

    def _away(self, now: float) -> list[tuple[float, float, int]]:
        """Of who is away as usual, how long that is as a rule, how long it is by now, and the rows it had last: neither
        a client that does not read nor one that is gone."""
        found = []
        for known in self._sequences.values():
            usual_s = self._usual_s(known)
            if known.told is None or usual_s is None:
                continue
            if now - known.told < _LATE * usual_s * (self._slower if known.num_rows > 1 else 1.0):
                found.append((usual_s, now - known.told, known.num_rows))
        return found

    def _usual_s(self, known: _Known) -> float | None:
        """How long it is away as a rule where no pass is made meanwhile. None: nobody was ever away."""
        if known.away_s is None:
            return self._away_s  # many begin at the same time, and are alike
        return known.away_s / self._slower if known.beside else known.away_s


def _drafts(away: Sequence[tuple[float, float, int]]) -> bool:
    """Whether some of these had more rows than one: somebody computes their drafts meanwhile."""
    return any(num_rows > 1 for _, _, num_rows in away)


def _moved(usual_s: float | None, now_s: float) -> float:
    return now_s if usual_s is None else usual_s + _GAIN * (now_s - usual_s)
