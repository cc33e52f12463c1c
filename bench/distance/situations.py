"""Defines which modes are measured in which situations, and in which order.

Knows distances and failures; does not know how a mode is run.
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
    """The distance to the draft, the number of streams, and the modes that take turns there."""

    name: str
    modes: Sequence[Mode]
    temperature: float = 0.0
    round_trip_ms: float | None = None
    streams: int = 1
    draft_is_there: bool = True


TEMPERATURES = (0.0, 1.0)


def situations(pair: Pair, quick: bool, temperatures: Sequence[float] = TEMPERATURES) -> list[Situation]:
    """The distances at each temperature, then load and failures at temperature 0 only."""
    distances = [
        Situation(
            f"{round_trip_ms:g} ms", modes(temperature, pair.fixed, pair.computes, quick), temperature, round_trip_ms
        )
        for round_trip_ms in ROUND_TRIPS_MS
        for temperature in temperatures
    ]
    if 0.0 not in temperatures:
        return distances
    some = [ALONE, AHEAD]
    return [
        *distances,
        Situation(f"{_STREAMS} streams", some, streams=_STREAMS),
        *([Situation("random", [ALONE, ASTRAY])] if pair.stranger else []),
        Situation("gone", some, draft_is_there=False),
    ]


def groups(plan: Sequence[Situation]) -> list[list[Situation]]:
    """Situations that are measured in turns. All distances are one group, so that other load on the machine affects
    them alike; every other situation is a group of its own."""
    distances = [each for each in plan if each.round_trip_ms is not None]
    return [distances, *([each] for each in plan if each.round_trip_ms is None)]


def num_runs(plan: Sequence[Situation], repeats: int) -> int:
    """The number of runs that ``measure`` does for the whole plan."""
    return sum(repeats * (1 + mode.learns) for situation in plan for mode in situation.modes)


async def measure(
    lab: Lab, group: Sequence[Situation], tokens: int, repeats: int, done: Callable[[Situation, Mode], None]
) -> list[list[Row]]:
    """The rows by situation. ``repeats`` times, run every mode in every situation in turn. A mode that learns has a
    short warm-up run before, which is left out. ``done`` is called after every run."""
    runs: dict[tuple[int, str], list[Run]] = {}
    for repeat in range(repeats):
        for index, situation in enumerate(group):
            if situation.draft_is_there:
                lab.move_draft(situation.round_trip_ms or 0.0)
            else:
                lab.kill_draft()
            # With many streams the samples are shorter, to limit the time.
            length = max(16, tokens // 2) if situation.streams > 1 else tokens
            for mode in situation.modes:
                if mode.learns:
                    await lab.run(mode, situation.temperature, situation.streams, max(16, length // 4), seed=0)
                    done(situation, mode)
            for mode in situation.modes:
                run = await lab.run(mode, situation.temperature, situation.streams, length, seed=1 + repeat)
                runs.setdefault((index, mode.name), []).append(run)
                done(situation, mode)
    name = lab.pair.name.value
    return [
        [
            Row.of(
                name, situation.temperature, situation.name, situation.round_trip_ms, mode.name, runs[index, mode.name]
            )
            for mode in situation.modes
        ]
        for index, situation in enumerate(group)
    ]
