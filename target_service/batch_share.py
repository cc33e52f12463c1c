"""How many rows of batch requests may join a pass that others wait for: as many as lengthen these passes by an eighth.

What a row costs is measured, from passes with different numbers of rows. Knows rows and seconds; does not know
sequences.
"""

from __future__ import annotations

_SHARE = 1 / 8
"""Of the time that the passes would take without them. The time per token of the others grows by as much."""

_MAX_VARIANCE = 1e6
"""Of differences of rows. Older ones lose weight as newer ones show more, and not with time: passes that are equally
large show nothing."""

_MAX_PROMPT_ROWS = 512
"""What a prompt adds to one pass at most."""


class BatchShare:
    """The account of batch requests at one target, in seconds of its passes."""

    def __init__(self) -> None:
        self._credit_s = 0.0
        self._covariance = self._variance = 0.0  # of the differences between a pass and the one before
        self._last: tuple[int, float] | None = None  # rows and seconds of the last pass
        self._num_rows = 0  # of batch requests in the pass at hand, beside others

    @property
    def row_s(self) -> float:
        """What a row adds to a pass; 0: nothing, or not known."""
        return max(0.0, self._covariance / self._variance) if self._variance else 0.0

    def affords(self, num_rows: int) -> bool:
        """Whether so many rows may join the others. If so they are paid for; the last ones may overdraw."""
        if (cost_s := self.row_s * min(num_rows, _MAX_PROMPT_ROWS)) and self._credit_s <= 0:
            return False
        self._credit_s -= cost_s
        self._num_rows += num_rows
        return True

    def observe_pass(self, num_rows: int, seconds: float, with_others: bool) -> None:
        """``with_others``: not of batch requests alone."""
        if self._last is not None and (more := num_rows - self._last[0]):
            self._covariance += more * (seconds - self._last[1])
            self._variance += more * more
            fade = min(1.0, _MAX_VARIANCE / self._variance)
            self._covariance, self._variance = fade * self._covariance, fade * self._variance
        self._last = num_rows, seconds
        if with_others:
            earned_s = _SHARE * max(0.0, seconds - self.row_s * min(self._num_rows, num_rows))
            self._credit_s = min(self._credit_s + earned_s, earned_s)
        self._num_rows = 0
