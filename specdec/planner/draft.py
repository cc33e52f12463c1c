"""A simulated draft: one step serves all sequences that wait for nodes. It grows ahead only while no sequence waits.

The counterpart of draft_service/engine.py. Steps are numbered, and a sequence computes the number of its last step when
it joins. The simulation of a step therefore takes equally long for any number of sequences.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

from specdec.passes.prefill import fair_share
from specdec.planner.ahead import Ahead
from specdec.planner.events import Events
from specdec.planner.pass_time import PassTime
from specdec.planner.request import Advance, State, Work


class Draft:
    """A draft. Its answers reach the orchestrator after another ``way_s`` seconds; with ``ahead`` it grows ahead."""

    def __init__(self, events: Events, pass_time: PassTime, way_s: float, ahead: Ahead | None) -> None:
        self.live = 0
        self.busy_s = 0.0
        self._events = events
        self._pass_time = pass_time
        self._chunk = pass_time.chunk()
        self._way_s = way_s
        self._ahead = ahead
        self._inbox: list[Advance] = []
        self._busy = False
        self._feeding: list[Work] = []
        self._steps = 0
        self._num_growing = 0
        self._done: dict[int, list[Work]] = {}
        self._ahead_ended: list[float] = []  # times at which passes ahead ended
        self._num_ahead = 0
        self._full: dict[int, list[Work]] = {}
        self._branches = 0  # rows of a pass ahead

    def receive(self, advances: Sequence[Advance]) -> None:
        """Receive a frame."""
        self._inbox.extend(advances)
        if not self._busy:
            self._go()

    def passes_ahead(self, work: Work, by: float) -> int:
        """The number of passes ahead for ``work`` that had ended by the time ``by``."""
        return max(0, bisect_right(self._ahead_ended, by) - work.ahead_from)

    def below(self, work: Work, advance: Advance, passes: int) -> int:
        """The number of nodes below the last committed token after ``passes`` passes ahead."""
        if self._ahead is None:
            return 0
        return self._ahead.nodes_below(advance.met, advance.accepted, work.flying, work.behind, passes)

    def _go(self) -> None:
        """Process the received advances, then begin the next pass."""
        inbox, self._inbox = self._inbox, []
        answered = [work for advance in inbox if (work := self._take(advance)) is not None]
        self._answer(answered)
        self._busy = True
        if self._num_growing or self._feeding:
            rows = self._num_growing
            if self._feeding:
                most = fair_share([work.request.unfed_draft for work in self._feeding], self._chunk.rows)
                for work in self._feeding:
                    fed = min(work.request.unfed_draft, most)
                    work.request.unfed_draft -= fed
                    rows += fed
            self._pass(rows, self._grown)
        elif self._num_ahead:
            self._pass(self._branches, self._grown_ahead)
        else:
            self._busy = False

    def _pass(self, rows: int, end: Callable[[None], None]) -> None:
        seconds = self._pass_time.seconds(rows)
        self._chunk.observe(rows, seconds)
        self.busy_s += seconds
        self._events.after(seconds, end, None)

    def _take(self, advance: Advance) -> Work | None:
        """Start the work of an advance. Returns the work if the wanted nodes exist already, else None."""
        request, before = advance.request, advance.request.work
        found = 0
        if before is not None:
            if before.state is State.GROWING:  # an open that is superseded before its nodes are complete
                before.behind = before.wanted - (before.done_at - self._steps)
            passes = len(self._ahead_ended) - before.ahead_from if before.began >= 0 else 0
            if passes or before.behind:
                found = self.below(before, advance, passes)
            self._leave(before)
        if advance.number < 0:
            return None
        request.work = work = Work(request, advance.number, advance.wanted)
        if not advance.wanted:
            self._begin(work, advance.flying, found - advance.flying)
            return None
        work.behind = found
        if request.unfed_draft:
            work.state = State.FEEDING
            self._feeding.append(work)
            return None
        return self._grow(work, advance.wanted - found)

    def _grow(self, work: Work, num_steps: int) -> Work | None:
        if num_steps <= 0:
            # No node is in flight before the first token.
            flying = work.wanted if work.number else 0
            self._begin(work, flying, max(work.behind, work.wanted) - flying)
            return work
        work.state = State.GROWING
        work.done_at = self._steps + num_steps
        self._num_growing += 1
        self._done.setdefault(work.done_at, []).append(work)
        return None

    def _grown(self, _: None) -> None:
        self._steps += 1
        answered = []
        for work in self._done.pop(self._steps, ()):
            if work.state is State.GROWING:
                self._num_growing -= 1
                answered.append(work)
        for work in answered:
            self._grow(work, 0)
        fed = [work for work in self._feeding if not work.request.unfed_draft]
        if fed:
            self._feeding = [work for work in self._feeding if work.request.unfed_draft]
            # The pass that ends the prefill gives the first node.
            answered += [work for work in fed if self._grow(work, work.wanted - 1) is not None]
        self._answer(answered)
        self._go()

    def _begin(self, work: Work, flying: int, behind: int) -> None:
        """The wanted nodes exist: begin to grow ahead below them, if enabled."""
        work.flying, work.behind = flying, behind
        work.began = self._events.now
        work.ahead_from = len(self._ahead_ended)
        work.state = State.IDLE
        if self._ahead:
            work.state = State.AHEAD
            self._count_ahead(work, 1)
            until = work.ahead_from + self._ahead.most_passes(flying, behind)
            self._full.setdefault(until, []).append(work)

    def _count_ahead(self, work: Work, sign: int) -> None:
        self._num_ahead += sign
        self._branches += sign * (self._ahead.num_branches(work.flying, work.behind) if self._ahead else 0)

    def _grown_ahead(self, _: None) -> None:
        self._ahead_ended.append(self._events.now)
        for work in self._full.pop(len(self._ahead_ended), ()):
            if work.state is State.AHEAD:
                self._leave(work)
        self._go()

    def _leave(self, work: Work) -> None:
        if work.state is State.GROWING:
            self._num_growing -= 1
        elif work.state is State.AHEAD:
            self._count_ahead(work, -1)
        elif work.state is State.FEEDING:
            self._feeding.remove(work)
        work.state = State.IDLE

    def _answer(self, works: Sequence[Work]) -> None:
        frames: dict[int, list[Work]] = {}
        for work in works:
            frames.setdefault(id(work.request.orchestrator), []).append(work)
        for frame in frames.values():
            orchestrator = frame[0].request.orchestrator
            assert orchestrator is not None, "a request has an orchestrator"
            self._events.after(self._way_s, orchestrator.growths, frame)
