"""Simulates one scenario, from the first request to the end of the last: builds the parts, creates arrivals, counts."""

from __future__ import annotations

import random

from specdec.planner.ahead import Ahead
from specdec.planner.draft import Draft
from specdec.planner.events import Events
from specdec.planner.orchestrator import Orchestrator
from specdec.planner.outcome import Mark, Outcome, outcome
from specdec.planner.request import Request
from specdec.planner.scenario import Scenario
from specdec.planner.target import Target

_WARM = 0.25
"""Share of the requests that is warm-up. The first ``streams`` requests, which arrive together, are warm-up as well."""


class Simulation:
    """A simulation that can ``run`` once. ``requests`` has all requests in order of arrival."""

    def __init__(self, scenario: Scenario) -> None:
        self.requests: list[Request] = []
        self._scenario = scenario
        self._events = Events()
        # A separate generator, so that arrivals and lengths do not depend on drafting.
        self._arrivals = random.Random(f"arrivals {scenario.seed}")
        lots = random.Random(f"lots {scenario.seed}")
        pair, paths, deployment = scenario.pair, scenario.paths, scenario.deployment
        to_target_s, to_draft_s = paths.overhead_s / 2, (paths.overhead_s + paths.round_trip_s) / 2
        self._targets = [Target(self._events, pair.target, to_target_s) for _ in range(deployment.targets)]
        ahead = Ahead.of(scenario)
        self._drafts = [Draft(self._events, pair.draft, to_draft_s, ahead) for _ in range(deployment.drafts)]
        self._orchestrators = [
            Orchestrator(self._events, scenario, self._targets, self._drafts, lots, self._ended)
            for _ in range(deployment.orchestrators)
        ]
        self.num_ended = 0
        self._begin = self._mark()
        self._end: Mark | None = None

    @property
    def num_tokens(self) -> int:
        return sum(each.num_tokens for each in self._orchestrators)

    @property
    def replicas(self) -> list[Target | Draft]:
        return [*self._targets, *self._drafts]

    def run(self) -> Outcome:
        workload = self._scenario.workload
        if workload.rate is not None:
            self._events.after(0.0, self._arrive_and_plan, workload.rate)
        else:
            for _ in range(min(workload.streams or 0, workload.num_requests)):
                self._arrive()
        self._events.run()
        end = self._end if self._end and self._end.time > self._begin.time else self._mark()
        deployment = self._scenario.deployment
        return outcome(self._begin, end, self.requests, deployment.targets, deployment.drafts)

    def _arrive_and_plan(self, rate: float) -> None:
        self._arrive()
        if len(self.requests) < self._scenario.workload.num_requests:
            self._events.after(self._arrivals.expovariate(rate), self._arrive_and_plan, rate)

    def _arrive(self) -> None:
        workload = self._scenario.workload
        number = len(self.requests)
        request = Request(self._events.now, self._length(workload.prompt), self._length(workload.output))
        self.requests.append(request)
        self._orchestrators[number % len(self._orchestrators)].arrive(request)
        at_once = workload.streams or 0
        if at_once >= workload.num_requests:
            return
        if number == at_once + int(_WARM * (workload.num_requests - at_once)):
            self._begin = self._mark()
        if number == workload.num_requests - 1:
            self._end = self._mark()  # the load decreases from here on

    def _length(self, mean: int) -> int:
        spread = self._scenario.workload.spread
        return max(1, round(mean * (1 + self._arrivals.uniform(-spread, spread)))) if spread else mean

    def _ended(self, request: Request) -> None:
        self.num_ended += 1
        workload = self._scenario.workload
        if workload.streams is not None and len(self.requests) < workload.num_requests:
            self._arrive()

    def _mark(self) -> Mark:
        return Mark(
            time=self._events.now,
            tokens=self.num_tokens,
            rounds=sum(each.num_rounds for each in self._orchestrators),
            foreseen=sum(each.num_foreseen for each in self._orchestrators),
            arrived=len(self.requests),
            ended=self.num_ended,
            target_busy_s=sum(each.busy_s for each in self._targets),
            draft_busy_s=sum(each.busy_s for each in self._drafts),
            passes=sum(each.num_passes for each in self._targets),
            rows=sum(each.num_rows for each in self._targets),
        )


def simulate(scenario: Scenario) -> Outcome:
    """Simulate ``scenario``."""
    return Simulation(scenario).run()
