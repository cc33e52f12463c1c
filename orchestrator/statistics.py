"""Speculation statistics of one sample, as reported to its client: counts, and the time spent in its rounds.

Knows the records of rounds and a clock; does not know tokens and why they were proposed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.rounds import RoundRecord, Source


@dataclass(slots=True)
class DraftCounts:
    """Rounds with draft tokens, and these tokens. Fields as in SpeculationStats of the contract.

    Mean accepted length = 1 + num_accepted_tokens / num_drafts.
    """

    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_lookup_tokens: int = 0
    num_accepted_lookup_tokens: int = 0
    num_self_draft_tokens: int = 0
    num_accepted_self_draft_tokens: int = 0

    def count_drafts(self, record: RoundRecord) -> bool:
        """Count a round. False: it has no draft tokens, or is an open, which verifies nothing even when it replays a
        round with a tree."""
        if not (record.num_nodes and record.number):
            return False
        num_nodes, num_accepted = record.num_nodes, len(record.accepted)
        self.num_drafts += 1
        self.num_draft_tokens += num_nodes
        self.num_accepted_tokens += num_accepted
        if record.source is Source.LOOKUP:
            self.num_lookup_tokens += num_nodes
            self.num_accepted_lookup_tokens += num_accepted
        elif record.source is Source.SELF_DRAFT:
            self.num_self_draft_tokens += num_nodes
            self.num_accepted_self_draft_tokens += num_accepted
        _reach(self.num_accepted_tokens_per_pos, max(record.verified_tree.depths))
        for depth in range(num_accepted):
            self.num_accepted_tokens_per_pos[depth] += 1
        return True


@dataclass(slots=True)
class Statistics(DraftCounts):
    """All fields of SpeculationStats. ``clock`` counts seconds."""

    num_rounds: int = 0
    num_replays: int = 0
    num_bonuses: int = 0
    num_bonus_hits: int = 0
    num_corrections_per_pos: list[int] = field(default_factory=list)
    num_correction_hits_per_pos: list[int] = field(default_factory=list)
    num_drafts_on_time: int = 0
    num_received_nodes: int = 0
    elapsed_us: int = 0
    draft_wait_us: int = 0
    target_queue_us: int = 0
    target_pass_us: int = 0
    target_sample_us: int = 0
    replays: list[tuple[str, int]] = field(default_factory=list)  # cause, and number of tokens fed again
    clock: Callable[[], float] = time.perf_counter
    _first: float | None = None  # time of the first verdict
    _corrected_at: int | None = None  # depth of the last verdict's correction; None: it was a bonus
    _undecided: bool = False  # the last verdict is not yet counted as a hit or a miss

    def count_round(self, record: RoundRecord) -> None:
        """Count a round, and its time."""
        now = self.clock()
        drafting, timings = record.drafting, record.timings
        self._count_decision(drafting.hit)
        self.num_rounds += 1
        self.num_received_nodes += drafting.num_received
        if self._first is None:
            self._first = now
        elif drafting.waited_s is not None:
            self.draft_wait_us += int(drafting.waited_s * 1e6)
        self.elapsed_us = int((now - self._first) * 1e6)
        if record.number:  # the pass of an open contains a prefill
            self.target_queue_us += timings.queue_us
            self.target_pass_us += timings.pass_us
            self.target_sample_us += timings.sample_us
        self._undecided = self.count_drafts(record)
        if self._undecided:
            is_bonus = record.verified_tree.ends_with(record.accepted)
            self._corrected_at = None if is_bonus else len(record.accepted)
            self.num_drafts_on_time += drafting.waited_s is None

    def _count_decision(self, hit: bool) -> None:
        """Count the last verdict, now that a round follows. ``hit``: a tree was there."""
        if not self._undecided:
            return
        if self._corrected_at is None:
            self.num_bonuses += 1
            self.num_bonus_hits += hit
            return
        for counts, number in ((self.num_corrections_per_pos, 1), (self.num_correction_hits_per_pos, hit)):
            _reach(counts, self._corrected_at)
            counts[self._corrected_at] += number

    def replayed(self, reason: str, num_tokens: int) -> None:
        self.num_replays += 1
        self.replays.append((reason, num_tokens))


def _reach(counts: list[int], position: int) -> None:
    counts.extend([0] * (position + 1 - len(counts)))
