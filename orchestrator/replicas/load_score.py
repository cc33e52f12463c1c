"""What a new sequence may expect of a replica, by the times of its answers. Pure: no clock, no connection."""

from __future__ import annotations

_SMOOTHING = 0.1
_UNKNOWN_LATENCY_S = 0.001
"""Assumed before the first answer. It is small so that a new replica is tried, the least busy one first."""


class LoadScore:
    """``latency_s``: of a round or an advance, as its callers see it; smoothed. None: no answer on this stream.
    ``usual_sequences``: live sequences during these answers; smoothed in the same way."""

    def __init__(self) -> None:
        self.latency_s: float | None = None
        self.usual_sequences = 0.0
        self.num_observed = 0  # answers in ``latency_s``
        self.slowest_growth_s = 0.0  # about the longest of the last hundred answers of a draft

    def observe_latency(self, latency_s: float, num_sequences: int) -> None:
        self.num_observed += 1
        if self.latency_s is None:
            self.latency_s, self.usual_sequences = latency_s, num_sequences
        else:
            self.latency_s += _SMOOTHING * (latency_s - self.latency_s)
            self.usual_sequences += _SMOOTHING * (num_sequences - self.usual_sequences)

    def observe_growth(self, seconds: float) -> None:
        """A draft answered a request for nodes after so long."""
        self.slowest_growth_s = max(seconds, 0.99 * self.slowest_growth_s)

    def wait_s(self, num_sequences: int) -> float:
        """Roughly the wait of a new sequence next to ``num_sequences``; smaller is better."""
        return (1 + num_sequences) * (self.latency_s or _UNKNOWN_LATENCY_S)
