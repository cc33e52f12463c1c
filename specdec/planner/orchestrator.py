"""A simulated orchestrator: admission, the steps after a verdict, and its processor, which handles answers in batches.

The counterpart of orchestrator/'s decoder, speculation and admission. Draws all random outcomes of a round.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

from specdec.planner.events import Events
from specdec.planner.request import Advance, Draft, Met, Request, Target, Work
from specdec.planner.scenario import Scenario

_Replica = TypeVar("_Replica", Target, Draft)


class Orchestrator:
    """An orchestrator. It calls ``ended`` for each finished request; ``lots`` is its source of random numbers."""

    def __init__(
        self,
        events: Events,
        scenario: Scenario,
        targets: Sequence[Target],
        drafts: Sequence[Draft],
        lots: random.Random,
        ended: Callable[[Request], None],
    ) -> None:
        self.num_tokens = self.num_rounds = self.num_foreseen = 0
        self._events = events
        self._targets, self._drafts = targets, drafts
        self._lots = lots
        self._ended = ended
        self._max_live = scenario.deployment.max_live
        self._num_draft_tokens = scenario.drafting.num_draft_tokens
        self._ahead = scenario.drafting.num_ahead_tokens > 0
        self._acceptance, self._runner_up = scenario.pair.acceptance, scenario.pair.runner_up
        certain = self._acceptance in (0, 1)
        self._log_acceptance = 0.0 if certain else math.log(self._acceptance)
        self._work_s = scenario.paths.work_s
        self._to_target_s = scenario.paths.overhead_s / 2
        self._to_draft_s = (scenario.paths.overhead_s + scenario.paths.round_trip_s) / 2
        self._num_live = 0
        self._queue: deque[Request] = deque()
        self._verdicts: list[Request] = []
        self._growths: list[Work] = []
        self._busy = False
        self._rounds: dict[int, list[Request]] = {}
        self._advances: dict[int, list[Advance]] = {}

    def arrive(self, request: Request) -> None:
        request.orchestrator = self
        if self._num_live < self._max_live:
            self._start(request)
            self._send()
        else:
            self._queue.append(request)

    def verdicts(self, frame: Sequence[Request]) -> None:
        self._verdicts.extend(frame)
        self._wake()

    def growths(self, frame: Sequence[Work]) -> None:
        self._growths.extend(frame)
        self._wake()

    def _wake(self) -> None:
        if not self._busy and (self._verdicts or self._growths):
            self._busy = True
            come = (self._verdicts, self._growths)
            self._verdicts, self._growths = [], []
            if self._work_s:
                self._events.after(self._work_s * (len(come[0]) + len(come[1])), self._worked, come)
            else:
                self._worked(come)

    def _worked(self, come: tuple[list[Request], list[Work]]) -> None:
        verdicts, growths = come
        for work in growths:
            request = work.request
            # No round waits for the answer to an open, or for an answer that comes too late.
            if work.number and work.number == request.advance and request.ended < 0:
                request.flying, request.behind = work.wanted, 0
                self._verify(request)
        for request in verdicts:
            self._commit(request)
        self._send()
        self._busy = False
        self._wake()

    def _start(self, request: Request) -> None:
        self._num_live += 1
        request.target = self._pick(self._targets)
        self._verify(request)
        if self._num_draft_tokens and request.left > 1:
            request.draft = self._pick(self._drafts)
            self._tell(Advance(request, 0, wanted=min(self._num_draft_tokens, request.left - 1)))

    def _commit(self, request: Request) -> None:
        flying = request.flying
        accepted = min(flying, self._num_right()) if flying else 0
        is_first = request.first < 0
        if is_first:
            request.first = self._events.now
        else:
            self.num_rounds += 1
        num_tokens = min(accepted + 1, request.left)
        self.num_tokens += num_tokens
        request.left -= num_tokens
        if not request.left:
            return self._end(request)
        wanted = min(self._num_draft_tokens, request.left - 1)
        request.flying = 0
        if request.draft is None:
            if is_first:  # autonomous decoding from here on
                request.run_on = request.left - 1
                self._verify(request)
            return None
        if not wanted:
            return self._verify(request)
        advance = Advance(request, request.advance + 1, wanted, 0, accepted, self._meet(accepted, flying))
        known = self._known(request.draft, request, flying, advance) if self._ahead else 0
        request.advance += 1
        if known:
            self.num_foreseen += 1
            request.flying = min(known, wanted)
            request.behind = known - request.flying
            advance = advance._replace(wanted=0, flying=request.flying)
            self._verify(request)
        self._tell(advance)
        return None

    def _num_right(self) -> int:
        """Draw the number of draft tokens in a row that the target accepts, in a chain of any length."""
        if not self._log_acceptance:
            return 1 << 30 if self._acceptance else 0
        return int(math.log(1.0 - self._lots.random()) / self._log_acceptance)

    def _meet(self, accepted: int, flying: int) -> Met:
        """Draw where the draft has the last token of the verdict, provided that it has grown that far."""
        if accepted == flying and self._lots.random() < self._acceptance:
            return Met.TAIL
        return Met.BRANCH if self._lots.random() < self._runner_up else Met.NOWHERE

    def _known(self, draft: Draft, request: Request, flying: int, advance: Advance) -> int:
        """The number of received nodes below the last committed token."""
        sent_by = self._events.now - self._to_draft_s
        work = request.work
        if work is not None and work.number == request.advance and 0 <= work.began <= sent_by:
            return draft.below(work, advance, draft.passes_ahead(work, sent_by))
        if advance.met is Met.TAIL:
            return max(0, request.behind - 1)
        return 0

    def _end(self, request: Request) -> None:
        request.ended = self._events.now
        self._num_live -= 1
        assert request.target is not None, "it was started"
        request.target.live -= 1
        self._events.after(self._to_target_s, request.target.close, request)
        if request.draft is not None:
            request.draft.live -= 1
            self._tell(Advance(request, -1))
        self._ended(request)
        if self._queue and self._num_live < self._max_live:
            self._start(self._queue.popleft())

    def _verify(self, request: Request) -> None:
        self._rounds.setdefault(id(request.target), []).append(request)

    def _tell(self, advance: Advance) -> None:
        self._advances.setdefault(id(advance.request.draft), []).append(advance)

    def _send(self) -> None:
        """Send one frame per replica."""
        for rounds in self._rounds.values():
            target = rounds[0].target
            assert target is not None, "it was started"
            self._events.after(self._to_target_s, target.receive, rounds)
        for advances in self._advances.values():
            draft = advances[0].request.draft
            assert draft is not None, "it was opened"
            self._events.after(self._to_draft_s, draft.receive, advances)
        self._rounds, self._advances = {}, {}

    def _pick(self, replicas: Sequence[_Replica]) -> _Replica:
        """Pick the replica with fewer sequences of two random ones."""
        chosen = replicas[0]
        if len(replicas) > 1:
            first, second = self._lots.sample(range(len(replicas)), 2)
            chosen = min(replicas[first], replicas[second], key=lambda replica: replica.live)
        chosen.live += 1
        return chosen
