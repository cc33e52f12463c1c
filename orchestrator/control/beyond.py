"""What of a round with the target is neither queue nor pass: the way there and back, and both event loops.

Where the next round is sent before the verdict it is no part of a round any more. Knows durations; refuses to know who
sends what.
"""

from __future__ import annotations

_GAIN = 0.1
"""The share of a round's news that is believed."""

_EARLY = 0.9
"""Of a pass, when the next round is to be at the target: passes are not alike."""


class Beyond:
    """Durations in seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """Of a round as rounds are now, sent early or not."""
        self._way_s = 0.0  # of those that were not

    def observe(self, seconds: float, under_way: bool) -> None:
        """A round took so much, from when it was sent to its verdict; one that was ``under_way`` by then, from the
        verdict before."""
        self.seconds = _moved(self.seconds, seconds)
        if not under_way:
            self._way_s = _moved(self._way_s, seconds)

    def early_s(self, pass_s: float, under_way: bool) -> float:
        """When the next round is to be sent, to be there as a pass of ``pass_s`` ends: so long after this one was, or
        if it was ``under_way`` by then after the verdict before. Later is too late; sooner, less of what the draft
        grows is in it."""
        return _EARLY * pass_s - (self._way_s if under_way else 0.0)


def _moved(usual_s: float, now_s: float) -> float:
    return usual_s + _GAIN * (min(now_s, 2 * usual_s + 1e-3) - usual_s)
