"""How much of a pass's time is left when no draft is being made: less than all where draft and target share a device.

Knows passes and how many sequences asked for drafts; refuses to know why they did.
"""

from __future__ import annotations

import math

from orchestrator.control.load import load_size

_GAIN, _MOST_NEWS, _NOISE = 0.35, 0.3, 0.03
_FEW, _CALM = 0.2, 2
"""A pass is calm where a smaller share drafts; and so many after the last other one tell what drafts cost. Later ones
may be faster for other reasons."""

_LARGE = 0.01
"""A smaller change after one pass may be noise."""

_MOST = 1.5
"""That drafts make a pass e to this times as long is the most that is believed."""

_FADE = 0.998
"""What is known of it fades by this with every pass without drafts: it may have changed meanwhile."""


class Contention:
    """By the number of sequences (within a factor of two) that share the target.

    ``ahead``: drafts are made during passes, and one of which nothing more is asked still uses up what it was granted.
    Others are waited for, and so are made during the passes in which their sequences are not.
    """

    def __init__(self, ahead: bool = False) -> None:
        self._ahead = ahead
        self._still_drafting = int(ahead)  # passes after the last draft that was asked for
        self._logs: dict[int, float] = {}
        self._asked = 0  # drafts since the last pass
        self._calm = self._quiet = 1 << 30  # passes in a row without drafts before or in them, and in them
        self.num_calm = 0
        """Passes without drafts, right after some with drafts."""

    def asked(self) -> None:
        """A draft is asked for, or has come: it was being made until now."""
        self._asked += 1

    def overlooked(self) -> None:
        """A pass tells nothing, and what was asked before it nothing of the next."""
        self._asked = 0

    def unseen(self, everybody: int) -> None:
        """Passes without drafts were looked for in vain: what they would take is known less and less."""
        size = load_size(everybody)
        self._logs[size] = self._logs.get(size, 0.0) / 2

    def share(self, everybody: int) -> float:
        """Of a pass's time with drafts, without."""
        return math.exp(min(0.0, self._logs.get(load_size(everybody), 0.0) + _NOISE))

    def slower(self, factor: float, everybody: int) -> None:
        """Passes with drafts are taken to be so many times as long as before. Of those without nothing new is known."""
        news = math.log(factor)
        if not self._quiet and abs(news) > _LARGE:
            size = load_size(everybody)
            self._logs[size] = max(-_MOST, min(0.0, self._logs.get(size, 0.0) - news))

    def with_drafts(self, pass_s: float, usual_s: float | None, num_drawn: int, everybody: int) -> float:
        """What a pass of ``num_drawn`` sequences, which took ``pass_s``, would have taken with drafts of all of them.

        ``usual_s``: what such a pass takes with drafts as a rule, None while that is not known.
        """
        asked, self._asked = self._asked, 0
        # Whoever is not in the pass may be waiting for a draft.
        away = max(0, everybody - num_drawn) / everybody
        drafting = min(1.0, asked / num_drawn + away)
        meanwhile = drafting if self._ahead else away
        self._calm = self._calm + 1 if drafting < _FEW else 0
        self._quiet = self._quiet + 1 if meanwhile < _FEW else 0
        self.num_calm += 0 < self._calm - self._still_drafting <= _CALM
        if not self._quiet:
            return pass_s / math.pow(self.share(everybody), 1.0 - meanwhile)
        size = load_size(everybody)
        known = self._logs.get(size, 0.0)
        num_quiet = self._quiet - self._still_drafting
        if 0 < num_quiet <= _CALM and usual_s is not None:
            news = max(-_MOST_NEWS, min(_MOST_NEWS, math.log(pass_s / usual_s) - known))
            self._logs[size] = known + _GAIN * news
        elif num_quiet > _CALM:
            self._logs[size] = known * _FADE
        return pass_s / self.share(everybody)
