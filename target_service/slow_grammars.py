"""Which sequences with slow grammars are in a pass. They take turns, and wait while others need the time."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.core.tree import EMPTY_TREE
from target_service.tasks import Task

SLOW_ROW_S = 0.001
"""Processor time for a row from which on a grammar is slow."""

_SLOW_SHARE, MAX_SLOW_S = 0.2, 0.01
"""The share of the time that slow grammars may take from other sequences, and how much of it at once."""


class SlowGrammars:
    def __init__(self) -> None:
        self._left_s, self._last = MAX_SLOW_S, 0.0

    def choose(self, tasks: Sequence[Task], now: float) -> list[Task]:
        """Those of the pass that begins at ``now``. A slow one may lose its tree."""
        self._left_s = min(MAX_SLOW_S, self._left_s + _SLOW_SHARE * (now - self._last))
        self._last = now
        row_s = {task: task.sampling.transforms.row_s for task in tasks}
        slow = [task for task in tasks if row_s[task] > SLOW_ROW_S]
        chosen = set(tasks).difference(slow)
        for task in sorted(slow, key=lambda task: -task.state.num_missed):
            if chosen and self._left_s <= 0.0:
                task.state.num_missed += 1
                continue
            if row_s[task] * (1 + len(task.tree)) > MAX_SLOW_S and task.sampling.spec.keyed_by_token:
                task.tree, task.self_draft_nodes = EMPTY_TREE, 0
            self._left_s -= row_s[task] * (1 + len(task.tree))
            task.state.num_missed = 0
            chosen.add(task)
        return [task for task in tasks if task in chosen]
