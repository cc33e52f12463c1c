"""The grid of simulated deployments, and how each is measured. Does not know how a policy decides."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

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
    def alone(self) -> float:
        return self.fixed[0]

    @property
    def median(self) -> float:
        return statistics.median(self.policy)

    @property
    def over_alone(self) -> float:
        return self.median / self.alone

    @property
    def over_best(self) -> float:
        return self.median / max(self.fixed)

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
    policy = tuple(tokens_per_s(adaptive(place, seed), WARM_UP_ROUNDS, rounds) for seed in SEEDS)
    by_number = ([tokens_per_s(fixed(place, k, seed), 10, rounds) for seed in SEEDS] for k in FIXED)
    return Result(point, policy, tuple(map(statistics.median, by_number)))
