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
class Block:
    """Modes that take turns in one situation."""

    situation: str
    modes: Sequence[Mode]
    temperature: float = 0.0
    round_trip_ms: float | None = None
    streams: int = 1
    draft_is_there: bool = True


def blocks(pair: Pair, quick: bool) -> list[Block]:
    """The distances at both temperatures, then what may go wrong, at temperature 0."""
    distances = [
        Block(f"{round_trip_ms:g} ms", modes(temperature, pair.fixed, pair.computes, quick), temperature, round_trip_ms)
        for round_trip_ms in ROUND_TRIPS_MS
        for temperature in (0.0, 1.0)
    ]
    some = [ALONE, AHEAD]
    return [
        *distances,
        Block(f"{_STREAMS} streams", some, streams=_STREAMS),
        *([Block("random", [ALONE, ASTRAY])] if pair.stranger else []),
        Block("gone", some, draft_is_there=False),
    ]


async def measure(lab: Lab, block: Block, tokens: int, repeats: int, done: Callable[[Mode], None]) -> list[Row]:
    """Every mode in turn, ``repeats`` times, after a short run that nobody counts. ``done`` hears of every run.

    Samples that share the target with many others are short.
    """
    if block.draft_is_there:
        lab.move_draft(block.round_trip_ms or 0.0)
    else:
        lab.kill_draft()
    if block.streams > 1:
        tokens = max(16, tokens // 4)
    runs: dict[str, list[Run]] = {mode.name: [] for mode in block.modes}
    for mode in block.modes:
        await lab.run(mode, block.temperature, block.streams, max(16, tokens // 4), seed=0)
        done(mode)
    for repeat in range(repeats):
        for mode in block.modes:
            runs[mode.name].append(await lab.run(mode, block.temperature, block.streams, tokens, seed=1 + repeat))
            done(mode)
    name = lab.pair.name.value
    return [
        Row.of(name, block.temperature, block.situation, block.round_trip_ms, mode, of_mode)
        for mode, of_mode in runs.items()
    ]
