"""Rounds of a deployment under a simulated clock: N sequences, a target and a draft that batch what waits, distances.

The services behave as the real step loops do: a sequence that arrives while the model is busy joins its next pass,
and a draft step makes one node for each sequence that drafts. Everything is drawn from a seed, so a run is
the same each time. Knows controllers; does not know the loop (tests/orchestrator/control/far_draft.py runs it).
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from orchestrator.control.controller import Adaptive, Controller, Fixed
from orchestrator.control.cost_model import CostModel
from orchestrator.control.draft_length import DraftLength
from orchestrator.drafting.draft_client import LATE
from orchestrator.rounds import Drafting, Exchange, RoundRecord, Source
from specdec.core.limits import MAX_DRAFT_TOKENS
from specdec.core.rounds import OVERRUN, Timings
from specdec.core.tree import TokenTree
from specdec.server.batch_delay import BatchDelay
from specdec.speculation.acceptance import CallersAcceptance
from specdec.speculation.cost import chain_chances, expected_tokens

CHAINS = [TokenTree.chain([1] * depth) for depth in range(65)]


@dataclass(frozen=True, slots=True)
class Place:
    """What a deployment is like. Times in milliseconds."""

    acceptance: float = 0.7
    pass_ms: float = 20.0
    step_ms: float = 2.0
    distance_ms: float = 0.0  # to the draft and back
    overhead_ms: float = 0.5  # of a round with either service
    sequences: int = 1
    knee_rows: float = 200.0  # beyond these a pass takes longer in proportion
    draft_knee_rows: float = 400.0
    noise: float = 0.05
    contention: float = 0.0  # the share by which a pass is longer while the draft works, and the reverse
    draft_dead: bool = False
    odd_acceptance: float | None = None  # of every second sequence, if it differs

    def acceptance_of(self, index: int) -> float:
        return self.acceptance if self.odd_acceptance is None or index % 2 == 0 else self.odd_acceptance

    def pass_s(self, rows: int) -> float:
        return self.pass_ms * max(1.0, 0.9 + 0.1 * rows / self.knee_rows, rows / self.knee_rows) / 1e3

    def step_s(self, rows: int) -> float:
        return self.step_ms * max(1.0, rows / self.draft_knee_rows) / 1e3


class Run:
    """``place`` may be replaced while it runs."""

    def __init__(self, place: Place, new_controller: Callable[[], Controller], seed: int = 0) -> None:
        self.place = place
        self.now = 0.0
        self.tokens = 0.0
        self.accidents_s = 0.0  # by which rare slow passes were longer
        self.depths: list[list[int]] = []
        self._random = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._verifying: list[_Stream] = []  # waiting at the target
        self._drafting: list[_Stream] = []
        self._target_busy = self._draft_busy = False
        self._delay = 0  # number of the last batch delay; the end of an earlier one is ignored
        self._batch_delay = BatchDelay()
        self._new_controller = new_controller
        self.streams: list[_Stream] = []
        self.join(place.sequences)

    def join(self, count: int) -> None:
        """Add ``count`` sequences."""
        for index in range(len(self.streams), len(self.streams) + count):
            stream = _Stream(index, self._new_controller())
            self.streams.append(stream)
            self.depths.append([])
            self._at(self._random.random() * self.place.pass_ms / 1e3, partial(self._begin, stream))

    def leave(self, count: int) -> None:
        """Remove ``count`` sequences."""
        for stream in self.streams[-count:]:
            stream.ended = True
        del self.streams[-count:]

    def on(self, rounds: int) -> Run:
        """Continue for ``rounds`` rounds of each sequence, on average."""
        until = sum(map(len, self.depths)) + rounds * len(self.streams)
        while self._events and sum(map(len, self.depths)) < until:
            self.now, _, event = heapq.heappop(self._events)
            event()
        return self

    def _at(self, delay_s: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + delay_s, next(self._order), event))

    def _noisy(self, seconds: float) -> tuple[float, float]:
        """The time that it takes, and how much of it is an accident."""
        noise = self.place.noise
        accident = 4.0 if noise and self._random.random() < 0.005 else 0.0
        usual_s = seconds * self._random.lognormvariate(0.0, noise)
        return usual_s * (1 + accident), usual_s * accident

    def _begin(self, stream: _Stream, autonomous: bool = False) -> None:
        plan = stream.controller.plan(UNENDING)
        num_tokens = sum(grant.num_tokens for grant in plan.grants)
        assert not (num_tokens and (autonomous or plan.num_autonomous))
        # The first token comes of the prompt, with nothing verified.
        stream.num_asked = stream.depth = stream.left = num_tokens if stream.round >= 0 else 0
        stream.since = self.now
        stream.round += 1
        self.depths[stream.index].append(stream.depth)
        if autonomous:
            if 2 * (1 + stream.to_come) <= plan.num_autonomous:  # as orchestrator.verifying.target_client does
                stream.to_come = plan.num_autonomous
            elif plan.num_autonomous + OVERRUN <= stream.to_come:
                self._at(self.place.overhead_ms / 2e3, lambda: self._interrupt(stream, plan.num_autonomous))
            return None
        stream.to_come = plan.num_autonomous
        if not stream.depth:
            return self._submit(stream)
        away_s = (self.place.overhead_ms + self.place.distance_ms) / 2e3
        this = stream.round
        self._at(plan.deadline_s, lambda: self._give_up(stream, this))
        if not self.place.draft_dead:
            self._at(away_s, lambda: self._arrive(stream, this))
        return None

    def _interrupt(self, stream: _Stream, run_on: int) -> None:
        in_a_pass = stream not in self._verifying
        stream.to_come = min(stream.to_come, run_on + in_a_pass)

    def _arrive(self, stream: _Stream, this: int) -> None:
        if stream.round == this and stream.left:
            self._drafting.append(stream)
            if not self._draft_busy:
                # What one frame brings takes effect together.
                self._draft_busy = True
                self._at(0.0, self._step)

    def _step(self) -> None:
        growing, self._drafting = self._drafting, []
        self._draft_busy = bool(growing)
        if growing:
            rounds = [stream.round for stream in growing]
            step_s = self.place.step_s(len(growing)) * (1 + self.place.contention * self._target_busy)
            self._at(self._noisy(step_s)[0], lambda: self._grown(growing, rounds))

    def _grown(self, growing: list[_Stream], rounds: list[int]) -> None:
        back_s = (self.place.overhead_ms + self.place.distance_ms) / 2e3
        for stream, this in zip(growing, rounds, strict=True):
            if stream.round != this or not stream.left:
                continue
            stream.left -= 1
            if stream.left:
                self._drafting.append(stream)
            else:
                self._at(back_s, partial(self._receive, stream, this))
        self._step()

    def _receive(self, stream: _Stream, this: int) -> None:
        if stream.round == this and not stream.submitted:
            stream.answered(self.now, 1.0)
            self._submit(stream)

    def _give_up(self, stream: _Stream, this: int) -> None:
        if stream.round == this and not stream.submitted:
            stream.answered(self.now, LATE)
            stream.depth = stream.left = 0
            self._submit(stream)

    def _submit(self, stream: _Stream) -> None:
        stream.submitted = True
        stream.since = self.now
        self._at(self.place.overhead_ms / 2e3, lambda: self._queue(stream))

    def _queue(self, stream: _Stream) -> None:
        stream.queued = self.now
        self._verifying.append(stream)
        self._batch_delay.returned(stream, self.now)
        if not self._target_busy:
            # What one frame brings takes effect together.
            self._target_busy = True
            self._at(0.0, self._pass)

    def _pass(self) -> None:
        num_leaving = sum(not stream.to_come for stream in self._verifying)
        delay_s = self._batch_delay.delay_s(len(self._verifying), num_leaving, self.now)
        if self._verifying and delay_s:
            self._target_busy, self._delay = False, self._delay + 1
            this = self._delay
            self._at(delay_s, lambda: self._end_delay(this))
            return
        batch, self._verifying = self._verifying, []
        self._target_busy = bool(batch)
        if batch:
            self._delay += 1
            rows = sum(stream.depth + 1 for stream in batch)
            pass_s = self.place.pass_s(rows) * (1 + self.place.contention * self._draft_busy)
            (pass_s, accident_s), started = self._noisy(pass_s), self.now
            self.accidents_s += accident_s
            self._batch_delay.observe_pass(rows, pass_s)
            self._at(pass_s, lambda: self._verified(batch, rows, pass_s, started))

    def _end_delay(self, this: int) -> None:
        if self._delay == this and not self._target_busy:
            self._target_busy = True
            self._pass()

    def _verified(self, batch: list[_Stream], rows: int, pass_s: float, started: float) -> None:
        for stream in batch:
            timings = Timings(int((started - stream.queued) * 1e6), int(pass_s * 1e6), 0, rows, len(batch))
            to_come, asked = stream.to_come, stream.asked
            stream.asked = not to_come
            if to_come:
                stream.to_come -= 1
                stream.queued = self.now
                self._verifying.append(stream)
            else:
                self._batch_delay.left(stream, self.now)
            self._at(
                self.place.overhead_ms / 2e3,
                partial(self._commit, stream, timings, asked, to_come),
            )
        self._pass()

    def _commit(self, stream: _Stream, timings: Timings, asked: bool, to_come: int) -> None:
        right, acceptance = 0, self.place.acceptance_of(stream.index)
        while right < stream.depth and self._random.random() < acceptance:
            right += 1
        # The expected number, not the drawn one: the same with less noise.
        tokens = expected_tokens(chain_chances([acceptance]), stream.depth)[-1]
        self.tokens += tokens
        stream.tokens += tokens
        drafting = Drafting(stream.num_asked, stream.waited_s, stream.answer)
        source = Source.DRAFT if stream.depth else None
        round_trip_s = self.now - stream.since if asked else None
        record = RoundRecord(
            number=stream.round,
            base=0,
            verified_tree=CHAINS[stream.depth],
            source=source,
            accepted=tuple(range(right)),
            drafting=drafting,
            timings=timings,
            num_autonomous_left=to_come,
            exchange=Exchange(round_trip_s, num_live=len(self.streams)),
        )
        stream.waited_s = stream.answer = None
        stream.controller.observe(record)
        stream.submitted = False
        if stream.ended:
            stream.to_come = 0
            self._batch_delay.removed(stream)
        else:
            self._begin(stream, autonomous=to_come > 0)


class _Stream:
    def __init__(self, index: int, controller: Controller) -> None:
        self.index = index
        self.controller = controller
        self.round = -1
        self.depth = self.left = self.num_asked = self.to_come = 0
        self.since = self.queued = self.tokens = 0.0
        self.submitted = self.ended = False
        self.asked = True
        self.waited_s: float | None = None
        self.answer: tuple[int, float] | None = None

    def answered(self, now: float, times: float) -> None:
        self.waited_s = now - self.since
        self.answer = self.num_asked, times * self.waited_s


UNENDING: Any = SimpleNamespace(remaining=1 << 30)


def fixed(place: Place, num_draft_tokens: int, seed: int = 0) -> Run:
    """Each sequence drafts ``num_draft_tokens`` in each round."""
    return Run(place, lambda: Fixed(num_draft_tokens), seed)


def adaptive(place: Place, seed: int = 0) -> Run:
    """The policy decides."""
    return Run(place, adaptive_controllers(), seed)


def adaptive_controllers(max_draft_tokens: int = MAX_DRAFT_TOKENS) -> Callable[..., Controller]:
    """Makes controllers of a caller's texts that share a policy and what is learnt, as in one orchestrator."""
    policy, acceptance = DraftLength(CostModel(), max_draft_tokens), CallersAcceptance()

    def controller(owner: bytes = b"") -> Controller:
        return Adaptive(policy, acceptance.of_text(owner))

    return controller


def tokens_per_s(run: Run, warm_up: int = 40, rounds: int = 80, accidents: bool = True) -> float:
    """After a warm-up, over ``rounds`` rounds of each sequence. ``accidents``: whether the time counts by which rare
    slow passes are longer. One in a short run is more than what most comparisons are about."""
    run.on(warm_up)
    tokens, since, accidents_s = run.tokens, run.now, run.accidents_s
    run.on(rounds)
    left_out_s = 0.0 if accidents else run.accidents_s - accidents_s
    return (run.tokens - tokens) / (run.now - since - left_out_s)
