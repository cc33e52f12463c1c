"""What a trial costs by the clock beyond what it was reckoned at, and so how long it is not repeated.

A few that wait for their drafts come back while the others are in a pass, slow them down and are slowed down: that no
curve over rows tells.

Knows rounds of the target alone and passes; refuses to know who tries and what is promised.
"""

from __future__ import annotations

from orchestrator.control.load import load_size
from orchestrator.control.savings import PROBING

_AFTERMATH = 2
"""Passes after a trial that still are of it: who was in it comes back late."""

_LONGEST = 256
"""Passes: what looks dear may have been an accident."""


class Toll:
    """By the number of sequences (within a factor of two) that share the target. Gains and losses in rounds of
    everybody."""

    def __init__(self) -> None:
        self._again: dict[int, int] = {}  # not before this pass
        self._until, self._size, self._excess = 0, 0, 0.0  # of the last trial

    def begin(self, until: int, everybody: int) -> None:
        """A trial, which is over ``until`` a pass."""
        self._until, self._size, self._excess = until + _AFTERMATH, load_size(everybody), 0.0

    def reckoned(self, gain: float) -> None:
        """A round of a trial was booked as so much."""
        self._excess += gain

    def gained(self, gain: float, everybody: int, now: int) -> None:
        """By the clock, of any request in pass ``now``."""
        size = load_size(everybody)
        if now < self._until and size == self._size:
            self._excess -= gain
            self._again[size] = self._until + round(min(_LONGEST, max(0.0, self._excess) / PROBING))

    def again(self, everybody: int) -> int:
        """The pass before which nothing is tried."""
        return self._again.get(load_size(everybody), 0)
