"""Sizing by many simulations: how much to draft, the smallest sufficient number of drafts, the sustainable rate.

Knows how to compare outcomes; does not know how a simulation runs. A deployment with more targets than a cell is
assumed to consist of independent cells: the orchestrators of a cell use only its targets and its drafts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from specdec.planner.outcome import Outcome
from specdec.planner.scenario import Deployment, Drafting, Pair, Paths, Scenario, Workload
from specdec.planner.simulation import simulate

MOST_DRAFT_TOKENS = 8
_ENOUGH = 2
"""Drafts per target that are assumed to be more than sufficient while the number of draft tokens is chosen."""

_NEARLY = 1.05
"""A number of drafts is sufficient if a request takes at most this many times as long as with _ENOUGH drafts."""

_ALIKE = 1.02
"""Settings within this factor of the best count as equal; the first one, which drafts least, is chosen."""

_LEAST_REQUESTS = 256

_WORSE = 2
"""The search for K ends after this many values in a row that are worse than a smaller one."""

_GROWS = 0.05  # Outcome.growth above which the queue grows
_BREAK_STEPS, _BREAK_FILLS = 4, 5
"""Bisection steps for the sustainable rate, and the number of simulated requests as a multiple of the capacity."""


@dataclass(frozen=True, slots=True)
class Demand:
    """The requirements. All numbers are per target: ``rate`` (requests per second) or ``streams``, ``max_live``, and
    ``drafts`` (None: the smallest sufficient number). Each target has one orchestrator."""

    pair: Pair
    paths: Paths
    prompt: int
    output: int
    spread: float
    rate: float | None
    streams: int | None
    max_live: int
    num_ahead_tokens: int
    drafts: float | None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Tried:
    drafting: Drafting
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Size:
    """The result for one number of targets. Rates are those of the whole deployment."""

    targets: int
    drafts: int
    simulated_targets: int
    drafting: Drafting
    outcome: Outcome  # of the simulated cell
    alone: Outcome  # of the same cell without drafting
    tried: tuple[Tried, ...]  # with _ENOUGH drafts, or with the given number
    breaks_at: float  # the sustainable rate, requests per second
    alone_breaks_at: float  # the same without drafting

    @property
    def scale(self) -> float:
        """Number of cells in the deployment."""
        return self.targets / self.simulated_targets


class Sizing:
    """Finds the size for a demand. Caches outcomes. ``note`` is called with a description of each simulation."""

    def __init__(self, demand: Demand, cell: int, note: Callable[[str], None] = lambda _: None) -> None:
        self._demand = demand
        self._cell = cell
        self._note = note
        self._known: dict[Scenario, Outcome] = {}

    def size(self, targets: int) -> Size:
        demand = self._demand
        cell = min(targets, self._cell)
        most = max(1, math.ceil(cell * (_ENOUGH if demand.drafts is None else demand.drafts)))
        tried = tuple(self._try(cell, most))
        bound = _ALIKE * min(_cost(each.outcome) for each in tried)
        best = next(each.drafting for each in tried if _cost(each.outcome) <= bound)
        drafts = most
        if not best.num_draft_tokens:
            drafts = 0
        elif demand.drafts is None:
            drafts = self._fewest(cell, most, best)
        # With only one target, or two that share a draft, because it takes long until a queue has visibly grown.
        breaking = 1 if drafts % cell == 0 else min(targets, 2)
        return Size(
            targets,
            math.ceil(drafts * targets / cell),
            cell,
            best,
            self._outcome(cell, drafts, best, 4),
            self._outcome(cell, 0, Drafting(), 4),
            tried,
            targets / breaking * self._breaks(breaking, math.ceil(drafts * breaking / cell), best),
            targets * self._breaks(1, 0, Drafting()),
        )

    def _try(self, targets: int, drafts: int) -> Iterator[Tried]:
        yield Tried(Drafting(), self._outcome(targets, 0, Drafting(), 2))
        for ahead in (0, self._demand.num_ahead_tokens) if self._demand.num_ahead_tokens else (0,):
            best, num_worse = math.inf, 0
            for count in range(1, MOST_DRAFT_TOKENS + 1):
                drafting = Drafting(count, ahead)
                found = self._outcome(targets, drafts, drafting, 2)
                yield Tried(drafting, found)
                num_worse = num_worse + 1 if _cost(found) > best else 0
                best = min(best, _cost(found))
                if num_worse == _WORSE:
                    break

    def _fewest(self, targets: int, most: int, drafting: Drafting) -> int:
        enough = _NEARLY * _cost(self._outcome(targets, most, drafting, 2))
        low, high = 0, most  # too few, and enough
        while high - low > 1:
            middle = (low + high) // 2
            if _cost(self._outcome(targets, middle, drafting, 2)) <= enough:
                high = middle
            else:
                low = middle
        return high

    def _breaks(self, targets: int, drafts: int, drafting: Drafting) -> float:
        """The sustainable rate: requests per second above which the queue grows."""
        demand = self._demand
        held = demand.max_live * targets
        full = self._run(targets, drafts, drafting, Workload(demand.prompt, demand.output, 2 * held, streams=held))
        # The throughput at full load. The sustainable rate is at most slightly above it.
        high = 1.1 * full.tokens_per_s / demand.output
        low = 0.0
        for _ in range(_BREAK_STEPS):
            middle = (low + high) / 2 if low else 0.75 * high
            found = self._run(targets, drafts, drafting, self._workload(_BREAK_FILLS * held, middle, None))
            if found.growth > _GROWS:
                high = middle
            else:
                low = middle
        return low

    def _outcome(self, targets: int, drafts: int, drafting: Drafting, times: int) -> Outcome:
        """Simulate about ``times`` as many requests as are live at a time, but at least _LEAST_REQUESTS."""
        demand = self._demand
        if demand.streams is not None:
            at_once = demand.streams * targets
            workload = self._workload(max(times * at_once, _LEAST_REQUESTS), None, at_once)
        else:
            assert demand.rate is not None, "either rate or streams is set"
            slowest_s = demand.output * demand.pair.target.seconds(1)
            num_requests = max(_LEAST_REQUESTS, math.ceil(times * 2 * slowest_s * demand.rate * targets))
            workload = self._workload(num_requests, demand.rate * targets, None)
        return self._run(targets, drafts, drafting, workload)

    def _workload(self, num_requests: int, rate: float | None, streams: int | None) -> Workload:
        demand = self._demand
        return Workload(demand.prompt, demand.output, num_requests, rate, streams, demand.spread)

    def _run(self, targets: int, drafts: int, drafting: Drafting, workload: Workload) -> Outcome:
        demand = self._demand
        deployment = Deployment(targets, drafts, targets, demand.max_live)
        scenario = Scenario(demand.pair, demand.paths, deployment, workload, drafting, demand.seed)
        if scenario not in self._known:
            load = f"{workload.streams} streams" if workload.rate is None else f"{workload.rate:.2f} requests/s"
            ahead = " ahead" if drafting.num_ahead_tokens else ""
            self._note(f"{targets} targets, {drafts} drafts, K = {drafting.num_draft_tokens}{ahead}, {load}")
            self._known[scenario] = simulate(scenario)
        return self._known[scenario]


def _cost(outcome: Outcome) -> float:
    """The mean time of a request, with a large penalty if the queue grows."""
    return outcome.request_s * (1000.0 if outcome.growth > _GROWS else 1.0)
