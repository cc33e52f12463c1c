"""Speculation statistics of one sample, as reported to its client: counts, and the time spent in its rounds.

Knows the records of rounds and a clock; does not know tokens and why they were proposed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from orchestrator.rounds import RoundRecord, Source


@dataclass(slots=True)
class Statistics:
    """The fields of SpeculationStats in the contract, under the same names. Mean accepted length =
    1 + num_accepted_tokens / num_drafts. ``clock`` counts seconds."""

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
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
    num_lookup_tokens: int = 0
    num_accepted_lookup_tokens: int = 0
    num_self_draft_tokens: int = 0
    num_accepted_self_draft_tokens: int = 0
    replays: list[tuple[str, int]] = field(default_factory=list)  # cause, and number of tokens fed again
    clock: Callable[[], float] = time.perf_counter
    _first: float | None = None  # time of the first verdict
    _corrected_at: int | None = None  # depth of the last verdict's correction; None: it was a bonus
    _undecided: bool = False  # the last verdict is not yet counted as a hit or a miss

    def observe(self, record: RoundRecord) -> None:
        """Count a round."""
        now = self.clock()
        proposal, drafting, timings = record.proposal, record.proposal.drafting, record.timings
        self._decided(drafting.hit)
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
        tree = proposal.tree
        self._undecided = bool(tree and record.number)
        if not self._undecided:
            return  # an open verifies nothing, even when it replays a round with a tree
        num_accepted = len(record.accepted)
        self._corrected_at = None if tree.ends_with(record.accepted) else num_accepted
        self.num_drafts += 1
        self.num_drafts_on_time += drafting.waited_s is None
        self.num_draft_tokens += len(tree)
        self.num_accepted_tokens += num_accepted
        if proposal.source is Source.LOOKUP:
            self.num_lookup_tokens += len(tree)
            self.num_accepted_lookup_tokens += num_accepted
        elif proposal.source is Source.SELF_DRAFT:
            self.num_self_draft_tokens += len(tree)
            self.num_accepted_self_draft_tokens += num_accepted
        _reach(self.num_accepted_tokens_per_pos, max(tree.depths))
        for depth in range(num_accepted):
            self.num_accepted_tokens_per_pos[depth] += 1

    def _decided(self, foreseen: bool) -> None:
        """Count the last verdict, now that a round follows. ``foreseen``: a speculation hit, a tree was there."""
        if not self._undecided:
            return
        if self._corrected_at is None:
            self.num_bonuses += 1
            self.num_bonus_hits += foreseen
            return
        for counts, number in ((self.num_corrections_per_pos, 1), (self.num_correction_hits_per_pos, foreseen)):
            _reach(counts, self._corrected_at)
            counts[self._corrected_at] += number

    def replayed(self, reason: str, num_tokens: int) -> None:
        self.num_replays += 1
        self.replays.append((reason, num_tokens))


def _reach(counts: list[int], position: int) -> None:
    counts.extend([0] * (position + 1 - len(counts)))
