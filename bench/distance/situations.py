"""Which mode is measured in which situation, and in which order.

Knows distances and misfortunes; refuses to know how a mode is run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from bench.distance.formula import FITTED_MS, PREDICTED_MS
from bench.distance.lab import Lab
from bench.distance.modes import AHEAD, ALONE, ASTRAY, Mode, modes
from bench.distance.pairs import Pair
from bench.distance.row import Row, Run

ROUND_TRIPS_MS = tuple(sorted((*FITTED_MS, PREDICTED_MS)))
_STREAMS = 32


@dataclass(frozen=True, slots=True)
class Situation:
    """Where the draft is and how many ask, and the modes that take turns there."""

    name: str
    modes: Sequence[Mode]
    temperature: float = 0.0
    round_trip_ms: float | None = None
    streams: int = 1
    draft_is_there: bool = True


def situations(pair: Pair, quick: bool) -> list[Situation]:
    """The distances at both temperatures, then what may go wrong, at temperature 0."""
    distances = [
        Situation(
            f"{round_trip_ms:g} ms", modes(temperature, pair.fixed, pair.computes, quick), temperature, round_trip_ms
        )
        for round_trip_ms in ROUND_TRIPS_MS
        for temperature in (0.0, 1.0)
    ]
    some = [ALONE, AHEAD]
    return [
        *distances,
        Situation(f"{_STREAMS} streams", some, streams=_STREAMS),
        *([Situation("random", [ALONE, ASTRAY])] if pair.stranger else []),
        Situation("gone", some, draft_is_there=False),
    ]


def num_runs(plan: Sequence[Situation], repeats: int) -> int:
    """That ``measure`` makes of all of them."""
    return sum(repeats + mode.learns for situation in plan for mode in situation.modes)


async def measure(lab: Lab, situation: Situation, tokens: int, repeats: int, done: Callable[[Mode], None]) -> list[Row]:
    """Every mode in turn, ``repeats`` times; those that learn have a short run before, which nobody counts. ``done``
    hears of every run.

    Samples that share the target with many others are shorter.
    """
    if situation.draft_is_there:
        lab.move_draft(situation.round_trip_ms or 0.0)
    else:
        lab.kill_draft()
    if situation.streams > 1:
        tokens = max(16, tokens // 2)
    runs: dict[str, list[Run]] = {mode.name: [] for mode in situation.modes}
    for mode in situation.modes:
        if mode.learns:
            await lab.run(mode, situation.temperature, situation.streams, max(16, tokens // 4), seed=0)
            done(mode)
    for repeat in range(repeats):
        for mode in situation.modes:
            runs[mode.name].append(
                await lab.run(mode, situation.temperature, situation.streams, tokens, seed=1 + repeat)
            )
            done(mode)
    name = lab.pair.name.value
    return [
        Row.of(name, situation.temperature, situation.name, situation.round_trip_ms, mode, of_mode)
        for mode, of_mode in runs.items()
    ]
