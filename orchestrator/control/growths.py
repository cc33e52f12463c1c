"""What drafts take, as all who draft together wait for them. Who drafts alone is answered sooner.

Knows durations and how many requests there are; refuses to know why they draft.
"""

from __future__ import annotations

import statistics

from orchestrator.control.way import Way

_NEWS = 1.25
"""A draft that takes so many times what it took is another."""


class Growths:
    """Between two passes of the target; ``way`` learns from them once half of all requests were answered."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._since_pass: dict[int, list[float]] = {}  # what growths of so many nodes took

    def took(self, num_nodes: int, seconds: float, everybody: int) -> bool:
        """One request's. Whether a draft is now thought to take a lot more, or less."""
        took_s = self._since_pass.setdefault(num_nodes, [])
        took_s.append(seconds)
        if len(took_s) != _half(everybody) and self._way.is_known:
            return False
        return self._learn(num_nodes, took_s, 1.0)

    def passed(self, everybody: int) -> bool:
        """A pass of the target: what fewer were answered before it tells little. Returns as ``took``."""
        news, half = False, _half(everybody)
        for num_nodes, took_s in self._since_pass.items():
            if len(took_s) < half:
                news |= self._learn(num_nodes, took_s, len(took_s) / half)
        self._since_pass.clear()
        return news

    def _learn(self, num_nodes: int, took_s: list[float], share: float) -> bool:
        expected_s = self._way.seconds(num_nodes)
        self._way.observe(num_nodes, statistics.median(took_s), share)
        return not 1 / _NEWS < self._way.seconds(num_nodes) / expected_s < _NEWS


def _half(everybody: int) -> int:
    return (everybody + 1) // 2
