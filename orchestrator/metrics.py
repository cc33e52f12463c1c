"""What the orchestrator counts, once per round or request; nothing per token."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from opentelemetry import metrics

from orchestrator.decoder import Step


class Metrics:
    """Instruments of the meter provider in force when this is made."""

    def __init__(self, live_sequences: Callable[[], int]) -> None:
        meter = metrics.get_meter("specdec")
        self._rounds = meter.create_counter("specdec.rounds", "{round}", "Verdicts received")
        self._drafts = meter.create_counter("spec_decode_num_drafts", "{draft}", "Rounds with something to verify")
        self._draft_tokens = meter.create_counter("spec_decode_num_draft_tokens", "{token}", "Draft tokens verified")
        self._accepted = meter.create_counter("spec_decode_num_accepted_tokens", "{token}", "Draft tokens accepted")
        self._accepted_per_pos = meter.create_counter(
            "spec_decode_num_accepted_tokens_per_pos", "{token}", "Draft tokens accepted, by depth"
        )
        self._parked = meter.create_counter("specdec.parked", "{sequence}", "Given up for a client that did not read")
        self._duration = meter.create_histogram("gen_ai.server.request.duration", "s", "Duration of a request")

        def observe(_: metrics.CallbackOptions) -> Iterable[metrics.Observation]:
            return [metrics.Observation(live_sequences(), {"service": "orchestrator"})]

        meter.create_observable_gauge("specdec.live_sequences", [observe], "{sequence}", "Samples being generated")

    def round_ended(self, step: Step) -> None:
        self._rounds.add(1)
        if step.tree and step.verdict.round:
            self._drafts.add(1)
            self._draft_tokens.add(len(step.tree))
            self._accepted.add(len(step.verdict.accepted))
            for depth in range(len(step.verdict.accepted)):
                self._accepted_per_pos.add(1, {"position": depth})

    def parked(self) -> None:
        self._parked.add(1)

    def request_ended(self, outcome: str, duration_s: float) -> None:
        self._duration.record(duration_s, {"outcome": outcome})
