"""``specdec bench control``: the policy for how much to draft, in simulated time, over a grid of deployments."""

from __future__ import annotations

import itertools
import json
import os
import random
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from bench.harness.command import run_benchmark
from testing.round_simulation import Place, adaptive, fixed, tokens_per_s

PASS_MS = 20.0
FIXED = (0, 1, 2, 4, 6, 8)
"""Numbers of draft tokens that the policy is compared with; 0: the target alone."""

SEEDS = (0, 1, 2)
WARM_UP_ROUNDS = 60
ROUNDS = {1: 480, 4: 160, 16: 120, 32: 100}
"""Rounds of each sequence that are measured, by the number of sequences."""

ACCEPTANCES = (0.0, 0.3, 0.6, 0.8, 0.95)
KNEES = {"cheap rows": 200.0, "priced rows": 40.0, "dear rows": 8.0}
"""Rows beyond which a pass takes longer in proportion."""

STEPS = (0.02, 0.1, 0.3)
"""A draft step, as a share of a pass."""

DISTANCES = (0.0, 0.25, 1.0)
"""The round trip to the draft, as a share of a pass."""

SHARED = 0.5
"""On a shared device: how much longer a pass takes while the draft works, and a draft step while the target does."""

MIN_OVER_ALONE, MIN_SHARED = 0.95, 0.90
"""Of the target alone: where each model has a device of its own, and where they share one."""


@dataclass(frozen=True, slots=True)
class Point:
    """A deployment of the grid."""

    rows: str  # a key of KNEES
    acceptance: float
    step: float
    distance: float
    sequences: int
    shared: bool = False

    @property
    def name(self) -> str:
        device = "shared device" if self.shared else f"distance {self.distance:g}"
        return f"{self.rows}, acceptance {self.acceptance:g}, step {self.step:g}, {device}, {self.sequences} sequences"

    @property
    def place(self) -> Place:
        place = Place(
            self.acceptance,
            PASS_MS,
            step_ms=PASS_MS * self.step,
            distance_ms=PASS_MS * self.distance,
            sequences=self.sequences,
            knee_rows=KNEES[self.rows],
        )
        return replace(place, contention=SHARED) if self.shared else place


@dataclass(frozen=True, slots=True)
class Result:
    """Tokens per second at a point: of the policy by seed, and of fixed numbers of draft tokens."""

    point: Point
    policy: tuple[float, ...]
    fixed: tuple[float, ...]  # as FIXED; medians over the seeds

    @property
    def over_alone(self) -> float:
        return statistics.median(self.policy) / self.fixed[0]

    @property
    def over_best(self) -> float:
        return statistics.median(self.policy) / max(self.fixed)

    @property
    def is_slow(self) -> bool:
        """Slower than the target alone by more than is allowed."""
        return self.over_alone < (MIN_SHARED if self.point.shared else MIN_OVER_ALONE)

    def as_json(self) -> dict[str, Any]:
        return {
            **asdict(self.point),
            "policy": [round(rate, 2) for rate in self.policy],
            "fixed": [round(rate, 2) for rate in self.fixed],
        }


def points() -> Iterator[Point]:
    """Every deployment of the grid: with devices of their own at all distances, then on a shared device."""
    for values in itertools.product(KNEES, ACCEPTANCES, STEPS, DISTANCES, ROUNDS):
        yield Point(*values)
    for rows, acceptance, step, sequences in itertools.product(KNEES, ACCEPTANCES, STEPS[1:], ROUNDS):
        yield Point(rows, acceptance, step, 0.0, sequences, shared=True)


def measured(point: Point) -> Result:
    place, rounds = point.place, ROUNDS[point.sequences]
    policy = tuple(tokens_per_s(adaptive(place, seed), WARM_UP_ROUNDS, rounds, accidents=False) for seed in SEEDS)
    by_number = ([tokens_per_s(fixed(place, k, seed), 10, rounds, accidents=False) for seed in SEEDS] for k in FIXED)
    return Result(point, policy, tuple(map(statistics.median, by_number)))


def main(
    every: Annotated[int, typer.Option(min=1, help="measure one deployment in so many")] = 1,
    json_file: Annotated[Path | None, typer.Option("--json", help="file to write the results to")] = None,
) -> None:
    """Simulate the policy over a grid of deployments, next to fixed numbers of draft tokens."""
    console, grid = Console(highlight=False), list(points())
    chosen = random.Random(1).sample(grid, len(grid) // every)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        simulated = pool.map(measured, chosen, chunksize=4)
        results = list(track(simulated, "Simulating", len(chosen), console=console, transient=True))
    console.print(summary(results))
    if slow := sorted((result for result in results if result.is_slow), key=lambda result: result.over_alone):
        console.print(f"\nSlower than the target alone by more than is allowed, {len(slow)} of {len(results)}:")
        for result in slow:
            console.print(f"  {result.over_alone:.2f}  {result.point.name}")
    over_best = [result.over_best for result in results]
    ratios = {"over_best_median": statistics.median(over_best), "over_best_p10": tenth_percentile(over_best)}
    console.print_json(json.dumps({name: round(ratio, 3) for name, ratio in ratios.items()}))
    if json_file is not None:
        lines = ",\n".join(json.dumps(result.as_json()) for result in results)
        json_file.write_text(f"[\n{lines}\n]\n")


def summary(results: Sequence[Result]) -> Table:
    """Medians by the price of rows and the number of sequences."""
    table = Table("rows", "N", "over alone", "over best K", "10th %")
    groups = {
        (rows, count): [r for r in results if (r.point.rows, r.point.sequences) == (rows, count)]
        for rows in KNEES
        for count in ROUNDS
    }
    for (rows, count), group in [*groups.items(), (("all", 0), list(results))]:
        if group:
            over_best = [result.over_best for result in group]
            table.add_row(
                rows,
                str(count or ""),
                f"{statistics.median(result.over_alone for result in group):.2f}",
                f"{statistics.median(over_best):.2f}",
                f"{tenth_percentile(over_best):.2f}",
                end_section=count == max(ROUNDS),
            )
    return table


def tenth_percentile(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 10]


if __name__ == "__main__":
    run_benchmark(main)
