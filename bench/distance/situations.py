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


TEMPERATURES = (0.0, 1.0)


def situations(pair: Pair, quick: bool, temperatures: Sequence[float] = TEMPERATURES) -> list[Situation]:
    """The distances at each temperature, then what may go wrong, at temperature 0 alone."""
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
    """What is measured in turn: all distances, so that what befalls the machine meanwhile befalls all of them; anything
    else by itself."""
    distances = [each for each in plan if each.round_trip_ms is not None]
    return [distances, *([each] for each in plan if each.round_trip_ms is None)]


def num_runs(plan: Sequence[Situation], repeats: int) -> int:
    """That ``measure`` makes of all of them."""
    return sum(repeats * (1 + mode.learns) for situation in plan for mode in situation.modes)


async def measure(
    lab: Lab, group: Sequence[Situation], tokens: int, repeats: int, done: Callable[[Situation, Mode], None]
) -> list[list[Row]]:
    """By situation. All of them in turn, ``repeats`` times, and in each every mode; those that learn have a short run
    before, which nobody counts. ``done`` hears of every run."""
    runs: dict[tuple[int, str], list[Run]] = {}
    for repeat in range(repeats):
        for index, situation in enumerate(group):
            if situation.draft_is_there:
                lab.move_draft(situation.round_trip_ms or 0.0)
            else:
                lab.kill_draft()
            # Samples that share the target with many others are shorter.
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
