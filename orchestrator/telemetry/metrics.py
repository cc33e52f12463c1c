"""Metrics that the orchestrator counts per round or request, never per token.

Rounds are summed in plain numbers, which a scrape or an export reads. Only requests, which are rarer, call an
instrument. Knows rounds and requests; does not know connections and queues (orchestrator.telemetry.pool_metrics).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from orchestrator.replicas.replica import Tally
from orchestrator.rounds import RoundRecord, Source
from orchestrator.statistics import Statistics
from orchestrator.telemetry.round_clock import PARTS, Split
from specdec.telemetry.instruments import Instruments, Points

_LOOK_EVERY_S = 1.0
_REQUEST_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 120, 300, 600)
_FIRST_BOUNDS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_BOUNDS_S = (0.00025, 0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.1, 0.2, 0.5, 1)

_REPLAY_REASONS = (
    "DRAINING",
    "HOSTILE_REPLICA",
    "OUT_OF_STEP",
    "PARKED",
    "PASS_FAILED",
    "PREEMPTED",
    "REPLICA_LOST",
    "WATCHDOG_FIRED",
)


@dataclass(slots=True)
class _Rounds:
    """Sums over the rounds of one kind."""

    num: int = 0
    num_tokens: int = 0
    seconds: float = 0.0  # without waiting for the client
    draft_s: float = 0.0  # part of ``seconds`` spent waiting for a draft


class Metrics:
    """The instruments, made with the meter provider that is set at construction."""

    def __init__(self) -> None:
        self.target_alone_s = 0.0
        """Estimated duration of a round without draft tokens at the present load; 0: not known."""
        self._look_due = 0.0
        self._open, self._plain, self._speculative = _Rounds(), _Rounds(), _Rounds()
        self._split = Split()
        self._num_draft_tokens = 0
        self._accepted_per_pos: list[int] = []
        self._num_lookup_tokens = self._num_accepted_lookup_tokens = 0
        self._num_self_draft_tokens = self._num_accepted_self_draft_tokens = 0
        self._num_received_nodes = self._num_unused_nodes = 0
        # Zeros, because Prometheus sees no increase in the first value of a series.
        self._replays = dict.fromkeys(_REPLAY_REASONS, 0)
        self._replayed_tokens = dict.fromkeys(_REPLAY_REASONS, 0)
        self._num_parked = 0
        instruments = Instruments()
        self._duration = instruments.histogram(
            "gen_ai.server.request.duration", "s", "From a request's arrival to its end", _REQUEST_BOUNDS_S
        )
        self._first_token = instruments.histogram(
            "gen_ai.server.time_to_first_token", "s", "From a request's arrival to its first token", _FIRST_BOUNDS_S
        )
        self._token = instruments.histogram(
            "gen_ai.server.time_per_output_token", "s", "Time per token after the first, by request", _TOKEN_BOUNDS_S
        )
        self._register(instruments)

    def round_ended(self, record: RoundRecord, split: Split, draft: Tally | None) -> None:
        """``draft``: the tally of the sequence's present draft replica, if it has one."""
        accepted, num_nodes = len(record.accepted), record.num_nodes
        rounds = self._plain
        if not record.number:
            rounds = self._open
        elif num_nodes:
            rounds = self._speculative
            self._num_draft_tokens += num_nodes
            while len(self._accepted_per_pos) < accepted:
                self._accepted_per_pos.append(0)
            for depth in range(accepted):
                self._accepted_per_pos[depth] += 1
            if record.proposal.source is Source.LOOKUP:
                self._num_lookup_tokens += num_nodes
                self._num_accepted_lookup_tokens += accepted
            elif record.proposal.source is Source.SELF_DRAFT:
                self._num_self_draft_tokens += num_nodes
                self._num_accepted_self_draft_tokens += accepted
            elif draft is not None:
                draft.num_rounds += 1
                draft.num_draft_tokens += num_nodes
                draft.num_accepted_tokens += accepted
        if draft is not None:
            draft.wait_s += split.draft
        rounds.num += 1
        rounds.num_tokens += accepted + 1
        rounds.seconds += split.total - split.client
        rounds.draft_s += split.draft
        self._split.add(split)

    def look_due(self) -> bool:
        """True once a second: for values that take too long to compute in every round."""
        now = time.monotonic()
        if now < self._look_due:
            return False
        self._look_due = now + _LOOK_EVERY_S
        return True

    def sample_ended(self, statistics: Statistics) -> None:
        self._num_received_nodes += statistics.num_received_nodes
        num_verified = statistics.num_draft_tokens - statistics.num_lookup_tokens - statistics.num_self_draft_tokens
        self._num_unused_nodes += max(0, statistics.num_received_nodes - num_verified)
        for reason, num_tokens in statistics.replays:
            self._replays[reason] = self._replays.get(reason, 0) + 1
            self._replayed_tokens[reason] = self._replayed_tokens.get(reason, 0) + num_tokens

    def parked(self) -> None:
        self._num_parked += 1

    def request_ended(self, outcome: str, clock: RequestClock) -> None:
        attributes = {"outcome": outcome}
        self._duration.record(clock.duration_s, attributes)
        if clock.first_s is not None:
            self._first_token.record(clock.first_s, attributes)
        if (per_token_s := clock.per_token_s) is not None:
            self._token.record(per_token_s, attributes)

    def _register(self, instruments: Instruments) -> None:
        kinds = {"open": self._open, "plain": self._plain, "speculative": self._speculative}

        def by_kind(value: Callable[[_Rounds], float]) -> Callable[[], Points]:
            return lambda: [(value(rounds), {"kind": kind}) for kind, rounds in kinds.items()]

        def one(value: Callable[[], float]) -> Callable[[], Points]:
            return lambda: [(value(), {})]

        counter = instruments.counter
        counter("specdec.rounds", "{round}", "Verdicts received", by_kind(lambda rounds: rounds.num))
        counter("specdec.round_tokens", "{token}", "Tokens committed by verdicts", by_kind(lambda r: r.num_tokens))
        counter("specdec.round_duration", "s", "Time of rounds, without slow clients", by_kind(lambda r: r.seconds))
        counter("specdec.round_draft_wait", "s", "Time that rounds waited for drafts", by_kind(lambda r: r.draft_s))
        counter("specdec.round_time", "s", "Time of rounds, by part of a round", self._parts)
        counter("spec_decode_num_drafts", "{draft}", "Rounds with draft tokens", one(lambda: self._speculative.num))
        counter("spec_decode_num_draft_tokens", "{token}", "Draft tokens verified", one(lambda: self._num_draft_tokens))
        counter(
            "spec_decode_num_accepted_tokens",
            "{token}",
            "Draft tokens accepted",
            one(lambda: sum(self._accepted_per_pos)),
        )
        counter(
            "spec_decode_num_accepted_tokens_per_pos",
            "{token}",
            "Draft tokens accepted, by depth",
            lambda: [(count, {"position": depth}) for depth, count in enumerate(list(self._accepted_per_pos))],
        )
        counter(
            "specdec.lookup_tokens",
            "{token}",
            "Verified draft tokens that were prompt-lookup proposals",
            one(lambda: self._num_lookup_tokens),
        )
        counter(
            "specdec.lookup_accepted_tokens",
            "{token}",
            "Accepted tokens of prompt-lookup proposals",
            one(lambda: self._num_accepted_lookup_tokens),
        )
        counter(
            "specdec.self_draft_tokens",
            "{token}",
            "Verified draft tokens that targets drafted themselves",
            one(lambda: self._num_self_draft_tokens),
        )
        counter(
            "specdec.self_draft_accepted_tokens",
            "{token}",
            "Accepted draft tokens that targets drafted themselves",
            one(lambda: self._num_accepted_self_draft_tokens),
        )
        counter(
            "specdec.draft_nodes_received",
            "{node}",
            "Nodes received from drafts, late ones too, of samples that have ended",
            one(lambda: self._num_received_nodes),
        )
        counter(
            "specdec.draft_nodes_unused",
            "{node}",
            "Received nodes that were never verified",
            one(lambda: self._num_unused_nodes),
        )
        counter("specdec.replays", "{replay}", "Sequences opened again", lambda: _by_reason(self._replays))
        counter("specdec.replayed_tokens", "{token}", "Tokens fed again", lambda: _by_reason(self._replayed_tokens))
        counter("specdec.parked", "{sequence}", "Sequences parked for a slow client", one(lambda: self._num_parked))
        instruments.gauge(
            "specdec.target_alone_round",
            "s",
            "Estimated duration of a round without draft tokens at the present load",
            lambda: [(self.target_alone_s, {})] if self.target_alone_s else [],
        )

    def _parts(self) -> Points:
        return [(getattr(self._split, part), {"part": part.removeprefix("model_")}) for part in PARTS]


class RequestClock:
    """The latencies of one request, from its arrival on. Each of its samples counts as one stream."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first: float | None = None
        self._last = 0.0
        self._num_tokens = 0
        self._num_samples: set[int] = set()

    def wrote(self, index: int, num_tokens: int) -> None:
        """A chunk of sample ``index`` was written."""
        if not num_tokens:
            return
        self._last = time.monotonic()
        self._first = self._first or self._last
        self._num_tokens += num_tokens
        self._num_samples.add(index)

    @property
    def duration_s(self) -> float:
        return time.monotonic() - self._started

    @property
    def first_s(self) -> float | None:
        """Time to the first token; None if there was none."""
        return None if self._first is None else self._first - self._started

    @property
    def per_token_s(self) -> float | None:
        """Time per token of a sample after its first; None if there was none."""
        further = self._num_tokens - len(self._num_samples)
        if self._first is None or further <= 0:
            return None
        return (self._last - self._first) * len(self._num_samples) / further


def _by_reason(counts: Mapping[str, int]) -> Points:
    return [(count, {"reason": reason}) for reason, count in list(counts.items())]
