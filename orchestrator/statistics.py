"""What speculation did for one sample, as its client is told: counts, and where the time of its rounds went.

Knows trees, verdicts and a clock; refuses to know tokens and why they were proposed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from specdec.rounds import Verdict
from specdec.tree import TokenTree


@dataclass(slots=True)
class Statistics:
    """See SpeculationStats in the contract; the names are the same. Mean accepted length =
    1 + num_accepted_tokens / num_drafts. ``clock`` counts seconds."""

    num_rounds: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_tokens_per_pos: list[int] = field(default_factory=list)
    num_replays: int = 0
    num_bonuses: int = 0
    num_bonuses_foreseen: int = 0
    num_corrections_per_pos: list[int] = field(default_factory=list)
    num_corrections_foreseen_per_pos: list[int] = field(default_factory=list)
    num_drafts_on_time: int = 0
    num_received_nodes: int = 0
    elapsed_us: int = 0
    draft_wait_us: int = 0
    target_queue_us: int = 0
    target_pass_us: int = 0
    target_sample_us: int = 0
    num_lookup_tokens: int = 0
    num_accepted_lookup_tokens: int = 0
    guessed: bool = False  # the tree of the last verdict, by a prompt lookup
    replays: list[tuple[str, int]] = field(default_factory=list)  # why, and how many tokens were fed again
    clock: Callable[[], float] = time.perf_counter
    _first: float | None = None  # when the first verdict came
    _waited: bool = False  # for the draft, since the last verdict
    _guesses: bool = False  # what is being verified
    _corrected_at: int | None = None  # by the last verdict; None: it was a bonus
    _undecided: bool = False  # whether it was foreseen

    def observe(self, tree: TokenTree, verdict: Verdict, corrected: bool) -> None:
        """A verdict on ``tree``; ``corrected``: on the way through it, not at its end."""
        now = self.clock()
        self.num_rounds += 1
        if self._first is None:
            self._first = now
        self.elapsed_us = int((now - self._first) * 1e6)
        if verdict.round:  # an open's pass has a prefill in it
            self.target_queue_us += verdict.timings.queue_us
            self.target_pass_us += verdict.timings.pass_us
            self.target_sample_us += verdict.timings.sample_us
        waited, self._waited = self._waited, False
        self._undecided = bool(tree)
        self.guessed = bool(tree) and self._guesses
        if not tree:
            return
        num_accepted = len(verdict.accepted)
        self._corrected_at = num_accepted if corrected else None
        self.num_drafts += 1
        self.num_drafts_on_time += not waited
        self.num_draft_tokens += len(tree)
        self.num_accepted_tokens += num_accepted
        if self.guessed:
            self.num_lookup_tokens += len(tree)
            self.num_accepted_lookup_tokens += num_accepted
        _reach(self.num_accepted_tokens_per_pos, max(tree.depths))
        for depth in range(num_accepted):
            self.num_accepted_tokens_per_pos[depth] += 1

    def go_on(self, foreseen: bool) -> None:
        """There will be a next round; ``foreseen``: something to verify in it was there as soon as the verdict."""
        if not self._undecided:
            return
        self._undecided = False
        if self._corrected_at is None:
            self.num_bonuses += 1
            self.num_bonuses_foreseen += foreseen
            return
        for counts, number in ((self.num_corrections_per_pos, 1), (self.num_corrections_foreseen_per_pos, foreseen)):
            _reach(counts, self._corrected_at)
            counts[self._corrected_at] += number

    def submits(self, guessed: bool) -> None:
        """What is to be verified next is there; ``guessed``: by a prompt lookup, not by the draft."""
        self._guesses = guessed

    def replayed(self, reason: str, num_tokens: int) -> None:
        self.num_replays += 1
        self.replays.append((reason, num_tokens))

    def proposed(self, num_nodes: int) -> None:
        """So many nodes came that were not there."""
        self.num_received_nodes += num_nodes

    @contextmanager
    def waiting_for_draft(self) -> Iterator[None]:
        """What happens inside is waiting for the draft."""
        self._waited = True
        started = self.clock()
        try:
            yield
        finally:
            if self._first is not None:
                self.draft_wait_us += int((self.clock() - started) * 1e6)


def _reach(counts: list[int], position: int) -> None:
    counts.extend([0] * (position + 1 - len(counts)))
