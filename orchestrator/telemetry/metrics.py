"""Metrics that the orchestrator counts per round or request, never per token.

Rounds are summed in plain numbers, which a scrape or an export reads. Only requests, which are rarer, call an
instrument. Knows rounds and requests; does not know connections and queues (orchestrator.telemetry.pool_metrics).
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from orchestrator.replicas.replica import Tally
from orchestrator.rounds import RoundRecord, Source
from orchestrator.statistics import DraftCounts, Statistics
from orchestrator.telemetry.round_clock import PARTS, Split
from specdec.telemetry.instruments import Instruments, Points

_POLL_EVERY_S = 1.0
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


_Row = tuple[str, str, str, str]
"""Name, unit and description of a counter, and the field that has its value."""

_OF_ROUNDS: tuple[_Row, ...] = (
    ("specdec.rounds", "{round}", "Verdicts received", "num"),
    ("specdec.round_tokens", "{token}", "Tokens committed by verdicts", "num_tokens"),
    ("specdec.round_duration", "s", "Time of rounds, without slow clients", "seconds"),
    ("specdec.round_draft_wait", "s", "Time that rounds waited for drafts", "draft_s"),
)
_LOOKUP, _SELF_DRAFT = "prompt-lookup proposals", "targets drafted themselves"
_OF_DRAFTS: tuple[_Row, ...] = (
    ("spec_decode_num_drafts", "{draft}", "Rounds with draft tokens", "num_drafts"),
    ("spec_decode_num_draft_tokens", "{token}", "Draft tokens verified", "num_draft_tokens"),
    ("spec_decode_num_accepted_tokens", "{token}", "Draft tokens accepted", "num_accepted_tokens"),
    ("specdec.lookup_tokens", "{token}", f"Verified draft tokens that were {_LOOKUP}", "num_lookup_tokens"),
    ("specdec.lookup_accepted_tokens", "{token}", f"Accepted tokens of {_LOOKUP}", "num_accepted_lookup_tokens"),
    ("specdec.self_draft_tokens", "{token}", f"Verified draft tokens that {_SELF_DRAFT}", "num_self_draft_tokens"),
    (
        "specdec.self_draft_accepted_tokens",
        "{token}",
        f"Accepted draft tokens that {_SELF_DRAFT}",
        "num_accepted_self_draft_tokens",
    ),
)
_RECEIVED = "Nodes received from drafts, late ones too, of samples that have ended"
_OF_SAMPLES: tuple[_Row, ...] = (
    ("specdec.draft_nodes_received", "{node}", _RECEIVED, "num_received_nodes"),
    ("specdec.draft_nodes_unused", "{node}", "Received nodes that were never verified", "num_unused_nodes"),
    ("specdec.parked", "{sequence}", "Sequences parked for a slow client", "num_parked"),
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
        self._poll_due = 0.0
        self._open, self._plain, self._speculative = _Rounds(), _Rounds(), _Rounds()
        self._split = Split()
        self._drafts = DraftCounts()
        self.num_received_nodes = self.num_unused_nodes = self.num_parked = 0
        # Zeros, because Prometheus sees no increase in the first value of a series.
        self._replays = dict.fromkeys(_REPLAY_REASONS, 0)
        self._replayed_tokens = dict.fromkeys(_REPLAY_REASONS, 0)
        instruments = Instruments()
        self._duration = instruments.histogram(
            "gen_ai.server.request.duration", "s", "From a request's arrival to its end", bounds=_REQUEST_BOUNDS_S
        )
        self._first_token = instruments.histogram(
            "gen_ai.server.time_to_first_token",
            "s",
            "From a request's arrival to its first token",
            bounds=_FIRST_BOUNDS_S,
        )
        self._token = instruments.histogram(
            "gen_ai.server.time_per_output_token",
            "s",
            "Time per token after the first, by request",
            bounds=_TOKEN_BOUNDS_S,
        )
        self._register(instruments)

    def round_ended(self, record: RoundRecord, split: Split, draft: Tally | None) -> None:
        """``draft``: the tally of the sequence's present draft replica, if it has one."""
        accepted, num_nodes = len(record.accepted), record.num_nodes
        rounds = self._plain if record.number else self._open
        if self._drafts.count_drafts(record):
            rounds = self._speculative
            if record.source is Source.DRAFT and draft is not None:
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

    def poll_due(self) -> bool:
        """True once a second: for values that take too long to compute in every round."""
        now = time.monotonic()
        if now < self._poll_due:
            return False
        self._poll_due = now + _POLL_EVERY_S
        return True

    def sample_ended(self, statistics: Statistics) -> None:
        self.num_received_nodes += statistics.num_received_nodes
        num_verified = statistics.num_draft_tokens - statistics.num_lookup_tokens - statistics.num_self_draft_tokens
        self.num_unused_nodes += max(0, statistics.num_received_nodes - num_verified)
        for reason, num_tokens in statistics.replays:
            self._replays[reason] = self._replays.get(reason, 0) + 1
            self._replayed_tokens[reason] = self._replayed_tokens.get(reason, 0) + num_tokens

    def parked(self) -> None:
        self.num_parked += 1

    def request_ended(self, outcome: str, clock: RequestClock) -> None:
        attributes = {"outcome": outcome}
        self._duration.record(clock.duration_s, attributes)
        if clock.first_s is not None:
            self._first_token.record(clock.first_s, attributes)
        if (per_token_s := clock.per_token_s) is not None:
            self._token.record(per_token_s, attributes)

    def _register(self, instruments: Instruments) -> None:
        counter = instruments.counter
        kinds = {"open": self._open, "plain": self._plain, "speculative": self._speculative}
        for name, unit, description, field in _OF_ROUNDS:
            counter(name, unit, description, read=partial(_by_kind, kinds, field))
        for owner, rows in ((self._drafts, _OF_DRAFTS), (self, _OF_SAMPLES)):
            for name, unit, description, field in rows:
                counter(name, unit, description, read=partial(_total, owner, field))
        counter("specdec.round_time", "s", "Time of rounds, by part of a round", read=self._parts)
        name, description = "spec_decode_num_accepted_tokens_per_pos", "Draft tokens accepted, by depth"
        counter(name, "{token}", description, read=self._per_position)
        counter("specdec.replays", "{replay}", "Sequences opened again", read=partial(_by_reason, self._replays))
        replayed = partial(_by_reason, self._replayed_tokens)
        counter("specdec.replayed_tokens", "{token}", "Tokens fed again", read=replayed)
        description = "Estimated duration of a round without draft tokens at the present load"
        instruments.gauge("specdec.target_alone_round", "s", description, read=self._target_alone)

    def _target_alone(self) -> Points:
        return [(self.target_alone_s, {})] if self.target_alone_s else []

    def _per_position(self) -> Points:
        counts = list(self._drafts.num_accepted_tokens_per_pos)
        return [(count, {"position": depth}) for depth, count in enumerate(counts)]

    def _parts(self) -> Points:
        return [(getattr(self._split, part), {"part": part.removeprefix("model_")}) for part in PARTS]


class RequestClock:
    """The latencies of one request, from its arrival on. Each of its samples counts as one stream."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._first: float | None = None
        self._last = 0.0
        self._num_tokens = 0
        self._samples: set[int] = set()

    def wrote(self, index: int, num_tokens: int) -> None:
        """A chunk of sample ``index`` was written."""
        if not num_tokens:
            return
        self._last = time.monotonic()
        self._first = self._first or self._last
        self._num_tokens += num_tokens
        self._samples.add(index)

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
        further = self._num_tokens - len(self._samples)
        if self._first is None or further <= 0:
            return None
        return (self._last - self._first) * len(self._samples) / further


def _by_kind(kinds: Mapping[str, _Rounds], field: str) -> Points:
    return [(getattr(rounds, field), {"kind": kind}) for kind, rounds in kinds.items()]


def _total(owner: object, field: str) -> Points:
    return [(getattr(owner, field), {})]


def _by_reason(counts: Mapping[str, int]) -> Points:
    return [(count, {"reason": reason}) for reason, count in list(counts.items())]
