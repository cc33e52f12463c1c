"""A time as a function of a count, learnt from noisy measurements: of rows in a pass.

Knows numbers; refuses to know what they measure. What is common to all counts (another load, a slower machine) is
believed within a few measurements, and what is particular to one count within many: so a measurement at one count
tells of all of them, and what was once seen at a count that is rarely used stays known.
"""

from __future__ import annotations

import math
import statistics
from bisect import bisect
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

_LEAST_GAIN, _MOST_GAIN = 0.05, 0.4
"""Of what is common: small differences are noise, large ones are news."""

_LEAST_S = 1e-6
"""Nothing is divided by a time of nothing."""

_SHAPE_GAIN = 0.02
"""Of what is particular to a count, once it was measured often."""

_LARGEST_STEP = math.log(2)
"""More than twice, or half, is not believed of one count at a time."""

_LARGEST_NEWS = 1.5
"""A count's first measurement is believed up to so many times what was expected at most."""

_FIT_EVERY = 8
"""Measurements after which the lines are drawn anew, once there are many: it takes longer than all else here."""

_TRUST = 4
"""Measurements after which a count is believed for itself as much as the line through all of them."""


@dataclass(slots=True)
class _Cell:
    """What was measured at about one count."""

    count: float
    shape: float  # time there, as a share of the level
    weight: int = 0
    corrected: float = 0.0  # by so much, a logarithm, the shape fell as what was measured first was an accident

    def correct(self, by: float) -> None:
        self.shape *= math.exp(-by)
        self.corrected += by


class Curve:
    """Never falls; a straight line where little was measured, and the measurements where there are many."""

    def __init__(self) -> None:
        self._level_s = 0.0
        self._cells: dict[int, _Cell] = {}
        self._recent: deque[float] = deque(maxlen=3)
        self._points: tuple[list[float], list[float]] | None = None
        self._num_observed = 0

    @property
    def is_known(self) -> bool:
        return bool(self._cells)

    @property
    def reach(self) -> float:
        """The largest count over the smallest that were measured; 0: none was."""
        counts = [cell.count for cell in self._cells.values()]
        return max(counts) / min(counts) if counts else 0.0

    def trusts(self, count: int) -> bool:
        """There are measurements at about ``count``, not only a line through those at others."""
        cell = self._cells.get(_bucket(count))
        return cell is not None and cell.weight >= _TRUST

    def observe(self, count: int, seconds: float) -> None:
        """``count`` > 0 took ``seconds``."""
        seconds = max(seconds, _LEAST_S)
        if not self._cells:
            self._level_s = seconds
        bucket = _bucket(count)
        cell = self._cells.get(bucket)
        if cell is None:
            cell = self._cells[bucket] = _Cell(count, self._first(count, seconds) / self._level_s)
        else:
            surprise = math.log(seconds / (self._level_s * cell.shape))
            self._recent.append(surprise)
            if surprise < -_LARGEST_STEP:
                # Nothing is that fast by accident, but what is hardly known may have been slow by one.
                if cell.weight < _TRUST:
                    cell.correct(-surprise)
                else:
                    self._fall(-surprise)
                surprise = 0.0
            else:
                # A slow one that stands alone is an accident, two of three are not.
                common = statistics.median(self._recent)
                self._level_s *= math.exp(min(_MOST_GAIN, _LEAST_GAIN + common * common) * common)
            gain = max(_SHAPE_GAIN, 1 / (cell.weight + 1))
            cell.shape *= math.exp(gain * max(-_LARGEST_STEP, min(_LARGEST_STEP, surprise)))
            cell.count += gain * (count - cell.count)
        cell.weight += 1
        for other in self._cells.values():
            # Fewer never take longer. Where they did, but once, that was an accident.
            if other.count < cell.count and other.weight == 1 and other.shape > cell.shape:
                other.correct(math.log(other.shape / cell.shape))
                self._points = None
        self._num_observed += 1
        if cell.weight <= _FIT_EVERY or self._num_observed % _FIT_EVERY == 0:
            self._points = None

    def _fall(self, by: float) -> None:
        """All takes less, by this logarithm. What was taken for an accident a moment ago may have been that."""
        self._level_s *= math.exp(-by)
        for cell in self._cells.values():
            if cell.weight < _TRUST:
                cell.correct(-min(by, cell.corrected))
        self._points = None

    def _first(self, count: int, seconds: float) -> float:
        """A count's first measurement. If it is slow that may be an accident, after which nobody would measure there
        again, but also what has grown with the count since the nearest that was measured."""
        if len(self._cells) < 2:
            return seconds
        expected_s = self.seconds(count)
        nearest = min((cell.count for cell in self._cells.values()), key=lambda known: abs(math.log(count / known)))
        in_proportion_s = self.seconds(nearest) * count / nearest
        return min(seconds, _LARGEST_NEWS * max(expected_s, in_proportion_s))

    def seconds(self, count: float) -> float:
        """What ``count`` > 0 takes now; never nothing. Needs a measurement.

        The line goes on up to twice what was measured. Beyond that nothing is known, and the time is taken to grow with
        the count: who tries more finds out step by step.
        """
        counts, shapes = self._points = self._points or self._fit()
        if count > counts[-1]:
            return max(_LEAST_S, self._level_s * shapes[-1] * count / counts[-1])
        above = min(max(bisect(counts, count), 1), len(counts) - 1)
        left, right = counts[above - 1], counts[above]
        share = (count - left) / (right - left)
        shape = shapes[above - 1] + share * (shapes[above] - shapes[above - 1])
        return max(_LEAST_S, self._level_s * shape)

    def _fit(self) -> tuple[list[float], list[float]]:
        """The curve as points to draw lines between and beyond."""
        cells = sorted(self._cells.values(), key=lambda cell: cell.count)
        weights = [min(cell.weight, 2 * _TRUST) for cell in cells]
        total = sum(weights)
        mean_count = sum(w * c.count for w, c in zip(weights, cells, strict=True)) / total
        mean_shape = sum(w * c.shape for w, c in zip(weights, cells, strict=True)) / total
        spread = sum(w * (c.count - mean_count) ** 2 for w, c in zip(weights, cells, strict=True))
        rise = sum(w * (c.count - mean_count) * (c.shape - mean_shape) for w, c in zip(weights, cells, strict=True))
        # From one count nothing is known of the others: then all of the time is taken to grow with it. A line
        # that falls, or that is negative at 0, is noise.
        steepest = mean_shape / mean_count
        slope = min(max(rise / spread, 0.0), steepest) if len(cells) > 1 else steepest
        counts, shapes = [0.0], [max(0.0, mean_shape - slope * mean_count)]
        for cell in cells:
            line = mean_shape + slope * (cell.count - mean_count)
            counts.append(cell.count)
            shapes.append((cell.weight * cell.shape + _TRUST * line) / (cell.weight + _TRUST))
        shapes[1:] = _rising(shapes[1:], [cell.weight + _TRUST for cell in cells])
        shapes[0] = min(shapes[0], shapes[1])
        counts.append(2 * counts[-1])
        shapes.append(shapes[-1] + slope * counts[-2])
        return counts, shapes


def _rising(values: Sequence[float], weights: Sequence[float]) -> list[float]:
    """More never takes less: the nearest to ``values`` of which none is below the one before. Neighbours that say
    otherwise are taken for their mean (pool adjacent violators)."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for value, weight in zip(values, weights, strict=True):
        pool = value, weight, 1
        while pools and pools[-1][0] > pool[0]:
            before = pools.pop()
            both = before[1] + pool[1]
            pool = (before[0] * before[1] + pool[0] * pool[1]) / both, both, before[2] + pool[2]
        pools.append(pool)
    return [mean for mean, _, many in pools for _ in range(many)]


def _bucket(count: int) -> int:
    return count if count < 16 else int(16 + 8 * math.log2(count / 16))
