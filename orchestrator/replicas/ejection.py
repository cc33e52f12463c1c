"""How long a replica is left alone after it failed, and on probation. Pure: no clock, no connection."""

from __future__ import annotations

FIRST_EJECTION_S = 10.0
MAX_EJECTION_S = 300.0
_PROBATION_ANSWERS = 64


class Ejection:
    """An ejected replica is left alone for ``pause_s``, twice as long each time. Afterwards it is on probation."""

    def __init__(self) -> None:
        self.pause_s = FIRST_EJECTION_S
        self._num_missing = 0  # answers, until the probation ends

    @property
    def on_probation(self) -> bool:
        return self._num_missing > 0

    def start_probation(self) -> None:
        self._num_missing = _PROBATION_ANSWERS

    def count_answer(self) -> None:
        """A valid answer shortens the probation."""
        self._num_missing = max(0, self._num_missing - 1)

    def end_pause(self) -> None:
        self.pause_s = min(2 * self.pause_s, MAX_EJECTION_S)

    def end_stream(self, lived_s: float) -> None:
        """A stream that lasted long enough makes the next pause a short one again."""
        if lived_s > 2 * self.pause_s:
            self.pause_s = FIRST_EJECTION_S
