"""The rounds of one sequence at its target: which of them still get verdicts, and whether a verdict is valid.

Pure: does not know lanes and replicas. Every transition gives a new value.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from orchestrator.sequence import Sequence
from specdec.core.rounds import OVERRUN, Round, Verdict
from specdec.core.tree import EMPTY_TREE, TokenTree


@dataclass(frozen=True, slots=True)
class RoundsInFlight:
    """``pending``: rounds that still get verdicts, at most two: the present one, and one sent after it. ``sent``,
    ``answered``: the numbers of the last round that was sent, and of the last one with a verdict.

    A round without a tree that follows an unanswered one supersedes it, so the target decodes autonomously as the last
    round says. One with a tree was sent early (pipelined verification).
    """

    pending: tuple[Round, ...] = ()
    sent: int = 0
    answered: int = 0

    @staticmethod
    def opened(base: int) -> RoundsInFlight:
        """After an open, which counts as round 0."""
        return RoundsInFlight((Round(0, base),))

    @property
    def pipelined(self) -> bool:
        """Whether the next verdict is on a round that was sent before the last verdict."""
        return bool(self.pending and self.pending[-1].tree)

    def num_autonomous_left(self, base: int) -> int:
        """Verdicts that follow at ``base`` without a further round; 0: a round is due, or one was sent early."""
        return 0 if self.pipelined or not self.pending else _num_verdicts_left(self.pending[-1], base)

    def renews(self, base: int, num_autonomous: int) -> bool:
        """Whether a round is sent now that allows ``num_autonomous`` more verdicts, or fewer than are left. The
        allowance is renewed before it runs out: a sequence that pauses misses a pass that the others are in."""
        left = self.num_autonomous_left(base)
        return self.answered == self.sent and (2 * left <= num_autonomous or num_autonomous + OVERRUN < left)

    def after_round(self, round_: Round) -> RoundsInFlight:
        return RoundsInFlight((*self.pending, round_), sent=round_.number, answered=self.answered)

    def after_verdict(self, verdict: Verdict) -> RoundsInFlight:
        """``verdict``: a valid one. A round that it dropped was never sent."""
        later = () if verdict.dropped_round else self._later(verdict.round)
        sent = verdict.round if verdict.dropped_round else self.sent
        autonomous: tuple[Round, ...] = ()
        if verdict.num_autonomous_left and (round_ := self._answered_by(verdict)) is not None:
            base = verdict.base + len(verdict.accepted) + 1
            num_autonomous = verdict.num_autonomous_left - 1
            autonomous = (replace(round_, base=base, tree=EMPTY_TREE, num_autonomous=num_autonomous, max_nodes=0),)
        return RoundsInFlight((*autonomous, *later), sent=sent, answered=verdict.round)

    def _answered_by(self, verdict: Verdict) -> Round | None:
        return next((round_ for round_ in self.pending if round_.number == verdict.round), None)

    def _later(self, number: int) -> tuple[Round, ...]:
        return tuple(round_ for round_ in self.pending if round_.number > number)

    def with_num_left(self, verdict: Verdict) -> Verdict:
        """A verdict that was just answered, with the number of those that follow: as the last round says."""
        last = self.pending[-1] if self.pending else None
        if last is None or last.number <= verdict.round or last.tree:
            return verdict
        return replace(verdict, num_autonomous_left=_num_verdicts_left(last, verdict.base + 1))

    def accepted_nodes(self, verdict: Verdict, sequence: Sequence, tree: TokenTree) -> tuple[int, ...] | None:
        """The accepted nodes as nodes of ``tree``, what is left of the round's tree; those of a self-draft as they
        are. None: they are no path there."""
        if verdict.self_draft:
            return verdict.accepted if verdict.self_draft.is_path(verdict.accepted) else None
        if (round_ := self._answered_by(verdict)) is None:
            return None
        committed: Seq[int] = sequence.ids[round_.base :]
        above = round_.tree.trace(committed)
        if len(above) < len(committed) and verdict.accepted:
            return None
        if not round_.tree.is_path((*above, *verdict.accepted)):
            return None
        nodes = tree.trace([round_.tree.token_ids[node] for node in verdict.accepted])
        return tuple(nodes) if len(nodes) == len(verdict.accepted) else None

    def problem(self, verdict: Verdict, sequence: Sequence, accepted: tuple[int, ...] | None) -> str:
        """Why a verdict is invalid; empty: it is valid. ``accepted``: see ``accepted_nodes``."""
        round_ = self._answered_by(verdict)
        if round_ is None or verdict.base != sequence.base:
            expected = " or ".join(str(round_.number) for round_ in self.pending)
            return f"round {verdict.round} at base {verdict.base} for {expected} at {sequence.base}"
        if (num_nodes := len(verdict.self_draft)) > round_.self_draft_nodes:
            return f"a self-draft of {num_nodes} nodes, more than the allowed {round_.self_draft_nodes}"
        if accepted is None:
            return f"accepted nodes {verdict.accepted}, which are no path of the tree it was sent"
        if verdict.num_autonomous_left > round_.num_autonomous:
            return f"{verdict.num_autonomous_left} autonomous verdicts left, more than {round_.num_autonomous}"
        if verdict.refused and (verdict.accepted or not round_.tree.draft_probs):
            return "it refuses a tree in which nothing was drawn, or accepts a part of it"
        early = [later.number for later in self._later(verdict.round) if later.tree]
        if verdict.dropped_round and [verdict.dropped_round] != early:
            return f"round {verdict.dropped_round} dropped, which was not sent early"
        if sequence.lacks_prompt_logprobs or _lacks_logprobs(verdict, sequence.request.output.num_logprobs):
            return "not the logprobs that were requested"
        return ""


def _num_verdicts_left(round_: Round, base: int) -> int:
    """Verdicts of a round that still come at ``base``."""
    return 1 + max(0, round_.num_autonomous - (base - round_.base))


def _lacks_logprobs(verdict: Verdict, num_top: int | None) -> bool:
    """Whether they are missing or of other tokens. A small vocabulary has fewer than ``num_top`` tokens."""
    if verdict.logprobs is None or num_top is None:
        return verdict.logprobs is not None or num_top is not None
    return len(verdict.logprobs) != 1 + len(verdict.accepted) or verdict.logprobs.num_top > num_top
