"""Metrics of the orchestrator's queue and of its replicas, each by its address.

Reads pools and replicas when a scrape or an export asks; does not know rounds (orchestrator.telemetry.metrics). The
series of an endpoint end when it is gone from its DNS name.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.replicas.pool import Pool
from orchestrator.replicas.replica import Replica, Tally
from specdec.telemetry.instruments import Instruments, Points


def observe(targets: Pool, drafts: Pool, live: Callable[[], int], waiting: Callable[[], int]) -> None:
    """Register the metrics. ``live``: sequences being generated; ``waiting``: requests in the queue."""
    instruments = Instruments()
    gauge, counter = instruments.gauge, instruments.counter
    service = {"service": "orchestrator"}
    gauge("specdec.live_sequences", "{sequence}", "Samples being generated", lambda: [(live(), service)])
    gauge("specdec.waiting_requests", "{request}", "Requests in the queue", lambda: [(waiting(), service)])

    gauge(
        "specdec.waiting_for_room",
        "{sequence}",
        "Sequences that retry after a full target refused them",
        lambda: [(len(targets.waiting_for_room), service)],
    )

    def replicas() -> list[Replica]:
        return [*targets.replicas, *drafts.replicas]

    def models() -> Points:
        return [
            (1, _labels(each, model=each.info.name, digest=each.info.model_digest[:12]))
            for each in replicas()
            if each.info
        ]

    def ready() -> Points:
        # Unresolved names are reported as not ready, too: a missing series would trigger no alert.
        return [(int(each.ready), _labels(each)) for each in replicas()] + [
            (0, {"role": role, "address": address})
            for role, pool in (("target", targets), ("draft", drafts))
            for address in list(pool.unresolved)
        ]

    def latency() -> Points:
        return [(each.latency_s, _labels(each)) for each in replicas() if each.latency_s is not None]

    def losses() -> Points:
        return [
            (count, _labels(each, reason=reason)) for each in replicas() for reason, count in list(each.losses.items())
        ]

    def refused() -> Points:
        return [(each.num_refused, _labels(each)) for each in list(targets.replicas)]

    def by_draft(value: Callable[[Tally], float]) -> Callable[[], Points]:
        return lambda: [(value(each.tally), {"address": each.address}) for each in list(drafts.replicas)]

    gauge("specdec.replica_info", "", "Always 1; the attributes say which model a replica serves", models)
    gauge("specdec.replica_ready", "", "1 while the replica can be used", ready)
    gauge("specdec.replica_latency", "s", "Latency of a round or an advance, smoothed", latency)
    counter("specdec.replica_losses", "{loss}", "Times that a replica was lost or ejected", losses)
    counter("specdec.refused_opens", "{open}", "Opens that a target had no room for; each attempt counts", refused)
    counter("specdec.draft_rounds", "{round}", "Rounds with tokens of this draft", by_draft(lambda t: t.num_rounds))
    counter("specdec.draft_tokens", "{token}", "Tokens of this draft verified", by_draft(lambda t: t.num_draft_tokens))
    counter("specdec.draft_accepted_tokens", "{token}", "Accepted tokens", by_draft(lambda t: t.num_accepted_tokens))
    counter("specdec.draft_wait", "s", "Time that rounds waited for this draft", by_draft(lambda t: t.wait_s))
    counter("specdec.draft_late", "{round}", "Rounds past its draft deadline", by_draft(lambda t: t.num_late))


def _labels(replica: Replica, **more: str) -> dict[str, str]:
    return {"role": replica.role.name, "address": replica.address, **more}
