"""What a draft takes for a number of tokens, learnt from noisy measurements: the way there and back, and a step each.

Knows numbers; refuses to know what is at the other end. A draft that answers later than it did is farther away, rather
than slower with every token, until other numbers of tokens say something else: a Kalman filter of two figures, in which
the way changes more easily than the step.
"""

from __future__ import annotations

import statistics
from collections import deque

_LEAST_S = 1e-6

_NOISE = 0.1
"""Of a measurement, as a share of it."""

_ACCIDENT = 0.25
"""A slow one that stands alone counts no more than this share of what was expected; two of three do."""

_STEP_NEWS = 0.2
"""What is new is taken to lie in the steps to this share, the rest in the way."""


class Way:
    """To a draft, or to several that are much alike."""

    def __init__(self) -> None:
        self._way_s = self._step_s = 0.0
        self._way_var = self._step_var = self._covar = 0.0
        self._fewest = self._most = 0
        self._recent: deque[float] = deque(maxlen=3)

    @property
    def is_known(self) -> bool:
        return self._most > 0

    @property
    def reach(self) -> float:
        """The largest number of tokens over the smallest that were measured; 0: none was."""
        return self._most / self._fewest if self._fewest else 0.0

    def seconds(self, count: float) -> float:
        """What ``count`` tokens take now; never nothing, but next to it before anything was measured."""
        return max(_LEAST_S, self._way_s + self._step_s * count)

    def observe(self, count: int, seconds: float, share: float = 1.0) -> None:
        """``count`` > 0 tokens took ``seconds``, by so much of the work that there is as a rule."""
        if not self.is_known:
            # From one number nothing is known of the others: then all of the time is taken to grow with it.
            self._fewest = self._most = count
            self._step_s = seconds / count
            self._way_var, self._step_var = seconds**2, self._step_s**2
            self._covar = -count * self._step_var
            return
        self._fewest, self._most = min(self._fewest, count), max(self._most, count)
        expected_s = self.seconds(count)
        surprise_s = seconds - expected_s
        self._recent.append(surprise_s)
        news_s = statistics.median(self._recent)
        if surprise_s < -_ACCIDENT * expected_s and share >= 1:
            news_s = surprise_s  # nothing is that fast by accident
        surprise_s = min(surprise_s, max(_ACCIDENT * expected_s, 2 * news_s))
        noise = (_NOISE * expected_s / share) ** 2
        foreseen = self._way_var + 2 * count * self._covar + count**2 * self._step_var + noise
        # That everything has changed is believed the less, the fewer say so.
        unforeseen = share * max(0.0, news_s**2 - foreseen)
        self._way_var += unforeseen
        self._step_var += (_STEP_NEWS / count) ** 2 * unforeseen
        self._learn(count, surprise_s, noise)

    def _learn(self, count: int, surprise_s: float, noise: float) -> None:
        along_way = self._way_var + count * self._covar
        along_step = self._covar + count * self._step_var
        here = max(0.0, along_way + count * along_step)  # rounding may make it a little less than nothing
        total = here + noise
        here_s = self._way_s + self._step_s * count + here / total * surprise_s
        self._way_s += along_way / total * surprise_s
        self._step_s += along_step / total * surprise_s
        self._way_var -= along_way**2 / total
        self._step_var -= along_step**2 / total
        self._covar -= along_way * along_step / total
        # What is below nothing is noise, and the other of the two accounts for all of it.
        if self._step_s < 0:
            self._way_s, self._step_s = here_s, 0.0
        elif self._way_s < 0:
            self._way_s, self._step_s = 0.0, max(0.0, here_s / count)
