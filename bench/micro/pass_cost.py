"""The time of a pass of a table model on this machine: the sleep, the late wake-up, and the engine's Python per row.

Drives the engines of both services in this process, without streams. The fastest of several passes counts; other delays
of a pass count as part of the message path.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from bench.models.table_model import Table, TableDrafter, TableVerifier
from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.rounds import Advance, Budget, Round, TargetOpen
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import TokenTree
from specdec.planner.pass_time import PassTime
from specdec.server.step_loop import Key
from target_service.engine import TargetEngine

_T = TypeVar("_T")

_REPEATS = 8
_MANY = 64
_NUM_NODES = 4


def target_pass_time(sleep_s: float) -> PassTime:
    """The time of target passes with 1 row, and with 64 sequences of 5 rows."""
    engine = TargetEngine(TableVerifier(Table(), pass_s=sleep_s))
    tree = TokenTree.chain(range(_NUM_NODES))

    def passes(keys: list[Key], tree: TokenTree) -> float:
        for key in keys:
            engine.open(key, TargetOpen(_spec(key.sequence)))
        bases = {verdict_key: 5 for verdict_key, _ in engine.step()}
        times = []
        for number in range(1, _REPEATS + 1):
            for key in keys:
                engine.submit(key, Round(number, bases[key], tree))
            results, seconds = _timed(engine.step)
            bases |= {key: verdict.base + len(verdict.accepted) + 1 for key, verdict in results}
            times.append(seconds)
        return min(times)

    one_s = passes([Key(0, 0)], TokenTree())
    engine.close(Key(0, 0))
    many_s = passes([Key(0, 1 + index) for index in range(_MANY)], tree)
    return PassTime(((1, one_s), (_MANY * (1 + _NUM_NODES), max(one_s, many_s))))


def draft_step_time(sleep_s: float) -> PassTime:
    """The time of draft steps for 1 and for 64 sequences."""
    engine = DraftEngine(TableDrafter(Table(), sleep_s))

    def steps(keys: list[Key]) -> float:
        for key in keys:
            engine.open(key, DraftOpen(_spec(key.sequence), Budget()))
        engine.step()
        for key in keys:
            engine.submit(key, Advance(1, 4, budget=Budget(_NUM_NODES * _REPEATS, _NUM_NODES * _REPEATS)))
        return min(_timed(engine.step)[1] for _ in range(_REPEATS))

    one_s = steps([Key(0, 0)])
    engine.close(Key(0, 0))
    many_s = steps([Key(0, 1 + index) for index in range(_MANY)])
    return PassTime(((1, one_s), (_MANY, max(one_s, many_s))))


def _spec(number: int) -> SequenceSpec:
    return SequenceSpec((1, 2, 3, 4 + number), 4, SamplingParams(temperature=0.0), number)


def _timed(work: Callable[[], _T]) -> tuple[_T, float]:
    started = time.perf_counter()
    return work(), time.perf_counter() - started
