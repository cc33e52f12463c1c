"""The target figures of the project, each computed from rows of one run. A figure that was not measured is absent.

Knows which modes are compared; does not know how they were measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from bench.distance.modes import ADAPTIVE, AHEAD, ALONE, is_fixed
from bench.distance.pairs import PairName
from bench.distance.row import Row


def pair_of_ratios(rows: Sequence[Row]) -> str:
    """The pair of all ratios that name no other pair: the damped pair if it was measured."""
    pairs = dict.fromkeys(row.pair for row in rows)
    return PairName.damped.value if PairName.damped in pairs else next(iter(pairs), "")


def ratios(rows: Sequence[Row]) -> dict[str, float]:
    """The ratios by name, at T = 0 unless named otherwise. "sync" is the best fixed K of the synchronous mode."""
    greedy = _Rows(rows, pair_of_ratios(rows), 0.0)
    drawn = _Rows(rows, PairName.bundled.value, 1.0)
    figures: dict[str, Callable[[], float]] = {
        "worst_over_alone": greedy.worst_over_alone,
        "ahead_over_sync_rtt20": lambda: greedy.ahead(20).over(greedy.best_sync(20)),
        "ahead_over_alone_rtt20": lambda: greedy.ahead(20).over(greedy.alone(20)),
        "ahead_over_sync_rtt50": lambda: greedy.ahead(50).over(greedy.best_sync(50)),
        "ahead_over_sync_rtt0": lambda: greedy.ahead(0).over(greedy.best_sync(0)),
        "ahead_rtt20_over_rtt0": lambda: greedy.ahead(20).over(greedy.ahead(0)),
        "bundled_t1_ahead_over_alone_rtt5": lambda: drawn.ahead(5).over(drawn.alone(5)),
    }
    found = {}
    for name, figure in figures.items():
        try:
            found[name] = round(figure(), 3)
        except KeyError:
            continue
    return found


def over_adaptive(rows: Sequence[Row]) -> dict[str, float]:
    """By situation, at T = 0: the mode ahead over the adaptive synchronous mode, which also uses prompt lookup. The
    ratio shows the gain of growing ahead alone."""
    greedy = [row for row in rows if (row.pair, row.temperature) == (pair_of_ratios(rows), 0.0)]
    waits = {row.situation: row for row in greedy if row.mode == ADAPTIVE.name}
    ahead = [row for row in greedy if row.mode == AHEAD.name and row.situation in waits]
    return {row.situation: round(row.over(waits[row.situation]), 3) for row in ahead}


class _Rows:
    """The rows of one pair at one temperature. Raises KeyError for a row that was not measured."""

    def __init__(self, rows: Sequence[Row], pair: str, temperature: float) -> None:
        self._rows = {
            (row.situation, row.mode): row for row in rows if (row.pair, row.temperature) == (pair, temperature)
        }

    def ahead(self, round_trip_ms: float) -> Row:
        return self._rows[f"{round_trip_ms:g} ms", AHEAD.name]

    def alone(self, round_trip_ms: float) -> Row:
        return self._rows[f"{round_trip_ms:g} ms", ALONE.name]

    def best_sync(self, round_trip_ms: float) -> Row:
        situation = f"{round_trip_ms:g} ms"
        rows = [row for (where, mode), row in self._rows.items() if where == situation and is_fixed(mode)]
        if not rows:
            raise KeyError(situation)
        return max(rows, key=lambda row: row.tokens_per_s)

    def worst_over_alone(self) -> float:
        """The smallest ratio of all situations, not only of the distances."""
        situations = dict.fromkeys(situation for situation, _ in self._rows)
        if not situations:
            raise KeyError
        return min(self._rows[each, AHEAD.name].over(self._rows[each, ALONE.name]) for each in situations)
