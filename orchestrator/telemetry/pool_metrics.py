"""Metrics of the orchestrator's queue and of its replicas, each by its address.

Reads pools and replicas when a scrape or an export asks; does not know rounds (orchestrator.telemetry.metrics). The
series of an endpoint end when it is gone from its DNS name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from orchestrator.replicas.pool import Pool
from orchestrator.replicas.replica import Replica, Tally
from specdec.telemetry.instruments import Instruments, Points


def register(targets: Pool, drafts: Pool, *, num_live: Callable[[], int], num_waiting: Callable[[], int]) -> None:
    """Register the metrics. ``num_live``: sequences being generated; ``num_waiting``: requests in the queue."""
    instruments = Instruments()
    gauge, counter = instruments.gauge, instruments.counter
    service = {"service": "orchestrator"}

    def one(read: Callable[[], int]) -> Callable[[], Points]:
        return lambda: [(read(), service)]

    gauge("specdec.live_sequences", "{sequence}", "Samples being generated", read=one(num_live))
    gauge("specdec.waiting_requests", "{request}", "Requests in the queue", read=one(num_waiting))
    description = "Sequences that retry after a full target refused them"
    gauge("specdec.waiting_for_room", "{sequence}", description, read=one(lambda: len(targets.waiting_for_room)))

    def by_replica(points: Callable[[Replica], Points], *pools: Pool) -> Callable[[], Points]:
        return lambda: [point for pool in pools for replica in list(pool.replicas) for point in points(replica)]

    def ready() -> Points:
        # Unresolved names are reported as not ready, too: a missing series would trigger no alert.
        for pool in (targets, drafts):
            yield from ((int(replica.ready), _labels(replica)) for replica in list(pool.replicas))
            yield from ((0, {"role": pool.role.name, "address": address}) for address in list(pool.unresolved))

    gauge("specdec.replica_ready", "", "1 while the replica can be used", read=ready)
    description = "Always 1; the attributes say which model a replica serves"
    gauge("specdec.replica_info", "", description, read=by_replica(_model, targets, drafts))
    description = "Latency of a round or an advance, smoothed"
    gauge("specdec.replica_latency", "s", description, read=by_replica(_latency, targets, drafts))
    description = "Times that a replica was lost or ejected"
    counter("specdec.replica_losses", "{loss}", description, read=by_replica(_losses, targets, drafts))
    description = "Opens that a target had no room for; each attempt counts"
    counter("specdec.refused_opens", "{open}", description, read=by_replica(_refused, targets))

    def tallies(value: Callable[[Tally], float]) -> Callable[[], Points]:
        return by_replica(lambda draft: [(value(draft.tally), {"address": draft.address})], drafts)

    for name, unit, description, value in _TALLIES:
        counter(name, unit, description, read=tallies(value))

    for name, unit, description, field, pools in (
        ("specdec.prefix_hits", "{open}", "Opens of prompts that name this replica first", "hits", (targets, drafts)),
        (
            "specdec.prefix_spills",
            "{open}",
            "Opens of prompts that name another one first",
            "spills",
            (targets, drafts),
        ),
        ("specdec.opened_tokens", "{token}", "Ids of the sequences opened", "num_tokens", (targets,)),
        ("specdec.cached_tokens", "{token}", "Those that were in its cache", "num_cached_tokens", (targets,)),
    ):
        counter(name, unit, description, read=by_replica(partial(_of_prefixes, field), *pools))


_TALLIES: Iterable[tuple[str, str, str, Callable[[Tally], float]]] = (
    ("specdec.draft_rounds", "{round}", "Rounds with tokens of this draft", lambda tally: tally.num_rounds),
    ("specdec.draft_tokens", "{token}", "Tokens of this draft verified", lambda tally: tally.num_draft_tokens),
    ("specdec.draft_accepted_tokens", "{token}", "Accepted tokens", lambda tally: tally.num_accepted_tokens),
    ("specdec.draft_wait", "s", "Time that rounds waited for this draft", lambda tally: tally.wait_s),
    ("specdec.draft_late", "{round}", "Rounds past its draft deadline", lambda tally: tally.num_late),
)


def _model(replica: Replica) -> Points:
    info = replica.info
    return [(1, _labels(replica, model=info.name, digest=info.model_digest[:12]))] if info else []


def _latency(replica: Replica) -> Points:
    latency_s = replica.load.latency_s
    return [(latency_s, _labels(replica))] if latency_s is not None else []


def _losses(replica: Replica) -> Points:
    return [(count, _labels(replica, reason=reason)) for reason, count in list(replica.losses.items())]


def _of_prefixes(field: str, replica: Replica) -> Points:
    return [(getattr(replica.prefixes, field), _labels(replica))]


def _refused(replica: Replica) -> Points:
    return [(replica.num_refused, _labels(replica))]


def _labels(replica: Replica, **more: str) -> dict[str, str]:
    return {"role": replica.role.name, "address": replica.address, **more}
