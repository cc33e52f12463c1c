"""The input of a simulation: models, network, deployment, workload and drafting. Durations are in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.planner.pass_time import PassTime
from specdec.speculation.acceptance import PRIOR


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and a draft. ``acceptance`` is per draft token. ``runner_up``, the probability that a correction is the
    draft's second guess, determines the hit rate of growing ahead; it is about 1/3 with real pairs (bench/LOG.md,
    2026-11-22)."""

    target: PassTime
    draft: PassTime
    acceptance: float
    runner_up: float = PRIOR[1]

    def __post_init__(self) -> None:
        _check(0 <= self.acceptance <= 1, "acceptance must lie between 0 and 1")
        _check(0 <= self.runner_up <= 1, "runner-up must lie between 0 and 1")


@dataclass(frozen=True, slots=True)
class Paths:
    """The network. ``round_trip_s`` is between orchestrator and draft; the target is beside the orchestrator.
    ``overhead_s`` is the RPC overhead of an exchange with either; ``work_s`` the orchestrator's CPU time per answer."""

    round_trip_s: float = 0.0
    overhead_s: float = 0.0
    work_s: float = 0.0

    def __post_init__(self) -> None:
        _check(min(self.round_trip_s, self.overhead_s, self.work_s) >= 0, "a path cannot take less than no time")


@dataclass(frozen=True, slots=True)
class Deployment:
    """Replicas of each service. An orchestrator generates at most ``max_live`` sequences at a time; others wait."""

    targets: int = 1
    drafts: int = 1
    orchestrators: int = 1
    max_live: int = 256

    def __post_init__(self) -> None:
        _check(min(self.targets, self.orchestrators, self.max_live) > 0, "there must be a target and an orchestrator")
        _check(self.drafts >= 0, "the number of drafts cannot be negative")


@dataclass(frozen=True, slots=True)
class Workload:
    """``num_requests`` requests arrive at ``rate`` (per second, Poisson) or from ``streams``, each of which sends one
    after the other. Lengths in tokens are uniform within ``spread`` of their means, ``prompt`` and ``output``."""

    prompt: int
    output: int
    num_requests: int
    rate: float | None = None
    streams: int | None = None
    spread: float = 0.0

    def __post_init__(self) -> None:
        _check(min(self.prompt, self.output, self.num_requests) > 0, "prompt, output and requests must be positive")
        _check((self.rate is None) != (self.streams is None), "name either an arrival rate or a number of streams")
        _check((self.rate or self.streams or 0) > 0, "rate or streams must be positive")
        _check(0 <= self.spread < 1, "spread must be at least 0 and less than 1")


@dataclass(frozen=True, slots=True)
class Drafting:
    """``num_draft_tokens`` per round (K). With ``num_ahead_tokens`` > 0 the draft grows below the nodes in flight."""

    num_draft_tokens: int = 0
    num_ahead_tokens: int = 0

    def __post_init__(self) -> None:
        _check(min(self.num_draft_tokens, self.num_ahead_tokens) >= 0, "K and nodes ahead cannot be negative")


@dataclass(frozen=True, slots=True)
class Scenario:
    """The whole input. The same scenario always gives exactly the same outcome."""

    pair: Pair
    paths: Paths
    deployment: Deployment
    workload: Workload
    drafting: Drafting
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self.deployment.drafts > 0 or not self.drafting.num_draft_tokens, "drafting needs at least one draft")


def _check(right: bool, otherwise: str) -> None:
    if not right:
        raise ValueError(otherwise)
