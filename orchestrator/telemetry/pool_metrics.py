"""What the orchestrator tells of its queue and of its replicas, each by its address.

Knows what can be read off them when a scrape or an export asks; refuses to know rounds
(orchestrator.telemetry.metrics). An endpoint that is gone from its name takes its numbers with it.
"""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.replicas.pool import Pool
from orchestrator.replicas.replica import Replica, Tally
from specdec.telemetry.instruments import Instruments, Points


def observe(targets: Pool, drafts: Pool, live: Callable[[], int], waiting: Callable[[], int]) -> None:
    """``live`` sequences are being generated, ``waiting`` requests are in the queue."""
    instruments = Instruments()
    gauge, counter = instruments.gauge, instruments.counter
    service = {"service": "orchestrator"}
    gauge("specdec.live_sequences", "{sequence}", "Samples being generated", lambda: [(live(), service)])
    gauge("specdec.waiting_requests", "{request}", "Waiting for their turn", lambda: [(waiting(), service)])

    gauge(
        "specdec.waiting_for_room",
        "{sequence}",
        "Refused by a target that is full, and coming back",
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
        # A name that leads nowhere is told, too: nobody would miss a series that never was.
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
    gauge("specdec.replica_latency", "s", "Of a round or an advance, smoothed", latency)
    counter("specdec.replica_losses", "{loss}", "Times that a replica in use was lost or set aside", losses)
    counter("specdec.refused_opens", "{open}", "Opens that a target had no room for; each attempt counts", refused)
    counter("specdec.draft_rounds", "{round}", "Rounds with tokens of this draft", by_draft(lambda t: t.num_rounds))
    counter("specdec.draft_tokens", "{token}", "Tokens of this draft verified", by_draft(lambda t: t.num_draft_tokens))
    counter("specdec.draft_accepted_tokens", "{token}", "Of these, accepted", by_draft(lambda t: t.num_accepted_tokens))
    counter("specdec.draft_wait", "s", "Time that rounds waited for this draft", by_draft(lambda t: t.wait_s))
    counter("specdec.draft_late", "{round}", "Rounds that gave up waiting for it", by_draft(lambda t: t.num_late))


def _labels(replica: Replica, **more: str) -> dict[str, str]:
    return {"role": replica.role.name, "address": replica.address, **more}
