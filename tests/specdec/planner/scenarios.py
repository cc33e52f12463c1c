"""Small scenarios whose answer is known."""

from __future__ import annotations

from specdec.planner.pass_time import PassTime
from specdec.planner.scenario import Deployment, Drafting, Pair, Paths, Scenario, Workload

PASS_S, STEP_S = 0.020, 0.0005


def scenario(
    num_draft_tokens=0,
    ahead=0,
    *,
    target=None,
    draft=None,
    acceptance=0.8,
    runner_up=0.5,
    round_trip_s=0.0,
    overhead_s=0.0,
    work_s=0.0,
    prompt=1,
    output=20_000,
    requests=1,
    streams=1,
    rate=None,
    spread=0.0,
    targets=1,
    drafts=1,
    max_live=256,
    seed=0,
):
    return Scenario(
        Pair(target or PassTime.line(PASS_S), draft or PassTime.line(STEP_S), acceptance, runner_up),
        Paths(round_trip_s, overhead_s, work_s),
        Deployment(targets, drafts, targets, max_live),
        Workload(prompt, output, requests, rate, streams if rate is None else None, spread),
        Drafting(num_draft_tokens, ahead),
        seed,
    )


def expected_tokens(acceptance, num_draft_tokens):
    return sum(acceptance**depth for depth in range(num_draft_tokens + 1))
