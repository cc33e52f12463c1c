"""The outcome of a simulation: speed, latency and utilization, over the time of steady load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specdec.planner.request import Request


@dataclass(frozen=True, slots=True)
class Outcome:
    """Times are in seconds, ``*_use`` is a share of the time. NaN: no data."""

    tokens_per_s: float
    requests_per_s: float
    first_token_s: tuple[float, float]  # p50, p99
    per_token_s: tuple[float, float]  # between the first token and the last, per request: p50, p99
    request_s: float  # mean, from arrival to end
    target_use: float
    draft_use: float
    rows_per_pass: float
    tokens_per_round: float
    foreseen: float  # speculation hit rate: share of the rounds for which a tree was ready at once
    num_ended: int
    growth: float  # increase of unfinished requests, as a share of the arrivals; above 0.05 the queue grows


@dataclass(frozen=True, slots=True)
class Mark:
    """Counters at one moment."""

    time: float
    tokens: int
    rounds: int
    foreseen: int
    arrived: int
    ended: int
    target_busy_s: float
    draft_busy_s: float
    passes: int
    rows: int


def outcome(begin: Mark, end: Mark, requests: Sequence[Request], num_targets: int, num_drafts: int) -> Outcome:
    """The outcome between two marks. Latencies are those of requests that arrived between them."""
    seconds = max(end.time - begin.time, 1e-12)
    seen = [request for request in requests if begin.time <= request.arrived <= end.time]
    per_token = [(request.ended - request.first) / (request.output - 1) for request in seen if request.output > 1]
    arrived, ended = end.arrived - begin.arrived, end.ended - begin.ended
    rounds = end.rounds - begin.rounds
    return Outcome(
        tokens_per_s=(end.tokens - begin.tokens) / seconds,
        requests_per_s=ended / seconds,
        first_token_s=_middle_and_tail([request.first - request.arrived for request in seen]),
        per_token_s=_middle_and_tail(per_token),
        request_s=sum(request.ended - request.arrived for request in seen) / max(1, len(seen)),
        target_use=(end.target_busy_s - begin.target_busy_s) / seconds / num_targets,
        draft_use=(end.draft_busy_s - begin.draft_busy_s) / seconds / max(1, num_drafts),
        rows_per_pass=(end.rows - begin.rows) / max(1, end.passes - begin.passes),
        # Approximate: the first token of a request comes from its prompt.
        tokens_per_round=(end.tokens - begin.tokens) / max(1, rounds),
        # A hit is counted when the tree is sent, a round when its verdict arrives, so the ratio may exceed 1.
        foreseen=min(1.0, (end.foreseen - begin.foreseen) / max(1, rounds)),
        num_ended=end.ended,
        growth=(arrived - ended) / max(1, arrived),
    )


def _middle_and_tail(values: list[float]) -> tuple[float, float]:
    if not values:
        return float("nan"), float("nan")
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[len(ordered) * 99 // 100]
