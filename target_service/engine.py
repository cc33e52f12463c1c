"""The engine of the target service: applies rounds, chooses the sequences of each pass, and makes the verdicts.

Knows the protocol (bases, rounds, run-on, draining); does not know tensors (see Verifier). Imports no torch, so that a
table model can serve the same protocol.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec.core.errors import ContextExceeded, Draining, InvalidArgument, OutOfStep, Preempted, SpecdecError
from specdec.core.limits import MAX_CHAIN_NODES, MAX_TREE_ROWS, take_turns
from specdec.core.rounds import Load, Round, Timings, Verdict
from specdec.core.sequence import Method
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.server.batch_delay import BatchDelay
from specdec.server.model_pass import run_pass
from specdec.server.step_loop import Key, Results, noop
from target_service.admission import Admission
from target_service.verifier import MAX_SELF_DRAFT_NODES, Decision, Job, TargetOpen, Verifier

_OWN_SALT = b"\0own"
"""Only sequences with self-drafts have the head's keys and values beside the target's."""

MAX_AUTONOMOUS = 64
"""Autonomous verdicts that a round may allow beside its own."""


@dataclass(slots=True)
class _Sequence:
    open: TargetOpen
    memory: Any
    ids: array[int]
    arrived: float  # arrival time of its request
    since: float  # start of its present or last wait
    pending: Round | None = None
    early: Round | None = None  # the round after ``pending``, sent before the verdict
    tree: TokenTree = EMPTY_TREE  # the part of the pending round's tree that still matches the text
    nodes: Sequence[int] = ()  # the index of each node of ``tree`` in the tree as it was sent
    num_autonomous: int = 0  # autonomous tokens that are still allowed
    self_draft_nodes: int = 0  # at most, of a self-draft, where there is no other tree
    last: int = 0  # the last answered round
    paused: bool = False  # under backpressure

    @property
    def base(self) -> int:
        return len(self.ids)

    @property
    def waits(self) -> bool:
        return self.pending is not None or (self.num_autonomous > 0 and not self.paused)

    @property
    def leaves(self) -> bool:
        """Whether it is in no pass after the next one until another round arrives."""
        more = self.num_autonomous - 1 if self.pending is None else self.pending.num_autonomous
        return more <= 0 and self.early is None

    @property
    def num_rows(self) -> int:
        """Rows that it takes in a pass at most, beside its prompt."""
        return 1 + (len(self.tree) or self.self_draft_nodes)

    @property
    def job(self) -> Job:
        opened, self_draft_nodes = self.open, 0 if self.tree else self.self_draft_nodes
        asked = opened.num_logprobs, opened.num_prompt_logprobs, opened.max_self_draft_nodes
        return Job(self.memory, self.ids, self.tree, *asked, self_draft_nodes)

    def take(self, round_: Round) -> None:
        """Make ``round_`` the pending one, its tree reduced to the part below the present base."""
        self.pending, self.num_autonomous = round_, 0
        self.self_draft_nodes = min(round_.self_draft_nodes, MAX_SELF_DRAFT_NODES)
        node = round_.tree.walk(self.ids[round_.base :])
        self.tree, self.nodes = (EMPTY_TREE, ()) if node is None else round_.tree.below(node)
        if round_.max_nodes:
            self.tree = self.tree.prefix(round_.max_nodes)

    def answered(self) -> None:
        """No round is pending any more."""
        self.pending, self.tree, self.nodes = None, EMPTY_TREE, ()


class TargetEngine:
    """See specdec.server.step_loop.Engine. ``clock``: the clock of the argument ``arrived`` of ``submit``, seconds."""

    def __init__(
        self, verifier: Verifier, max_sequences: int = 1024, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._verifier = verifier
        self._clock = clock
        self._admission = Admission(max_sequences, verifier.block_size)
        self._sequences: dict[Key, _Sequence] = {}
        self._batch_delay = BatchDelay()
        self._batch: list[Key] = []
        self._passes = self._rows = 0
        self._autonomous: set[Key] = set()  # sequences with an autonomous verdict in the pass at hand
        self._deferred: list[tuple[Key, Round, float | None]] = []  # rounds for them, submitted during the pass
        self._draining = False

    def open(self, key: Key, open_: TargetOpen) -> None:
        if self._draining:
            raise Draining("this target is draining; open the sequence on another one")
        limit = self._verifier.info.context_length
        if len(open_.spec.token_ids) >= limit:
            raise ContextExceeded(
                f"{len(open_.spec.token_ids)} token ids leave no room to generate in a context of {limit}"
            )
        now = self._clock()
        arrived = now - open_.age_s
        _, num_slots = self._verifier.cache_use()
        self._admission.check(open_.spec, arrived, now, num_slots)
        spec = open_.spec
        if open_.max_self_draft_nodes:
            spec = replace(spec, cache_salt=spec.cache_salt + _OWN_SALT)
        memory = self._verifier.open(spec)
        ids = array("I", spec.token_ids)
        self._sequences[key] = sequence = _Sequence(replace(open_, spec=spec), memory, ids, arrived, now)
        sequence.take(Round(0, len(ids)))
        self._admission.enter(key, open_.spec, ids)

    def submit(self, key: Key, round_: Round, arrived: float | None = None) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        if key in self._autonomous:
            self._deferred.append((key, round_, arrived))
            return
        spec, before = sequence.open.spec, sequence.pending
        if before is not None and (sequence.early or not round_.tree or not spec.keyed_by_token):
            raise OutOfStep(f"round {before.number} is unanswered; wait for its verdict")
        expected = 1 + (sequence.last if before is None else before.number)
        if round_.number != expected:
            raise OutOfStep(f"round {expected} was expected, not {round_.number}")
        if not spec.num_prompt_tokens <= round_.base <= sequence.base:
            raise OutOfStep(f"base {sequence.base} was expected, not {round_.base}")
        if round_.tree and not spec.keyed_by_token:
            if round_.base != sequence.base:
                raise OutOfStep(f"base {sequence.base} was expected, not {round_.base}, with {spec.method.value}")
            if not round_.tree.is_chain or len(round_.tree) > MAX_CHAIN_NODES:
                problem = f"{spec.method.value} verification takes chains only, of at most {MAX_CHAIN_NODES} nodes"
                raise InvalidArgument([("tree", problem)])
        if round_.tree.draft_probs and spec.method is Method.COUPLED:
            raise InvalidArgument([("tree.draft_probs", "coupled verification takes no distributions")])
        if round_.self_draft_nodes > sequence.open.max_self_draft_nodes:
            raise InvalidArgument(
                [
                    (
                        "self_draft_nodes",
                        f"at most {sequence.open.max_self_draft_nodes} (the open), not {round_.self_draft_nodes}",
                    )
                ]
            )
        limit = self._verifier.info.context_length
        if sequence.base >= limit:
            raise ContextExceeded(f"the sequence has reached the end of the context of {limit}")
        if round_.tree and round_.base + max(round_.tree.depths) >= limit:
            raise ContextExceeded(f"the tree reaches beyond the context of {limit}")
        if before is not None:
            sequence.early = round_
            return
        sequence.take(round_)
        arrived = self._clock() if arrived is None else arrived
        self._batch_delay.returned(key, arrived)
        # A round that arrives during autonomous decoding waits from the last verdict on.
        sequence.since = max(arrived, sequence.since)

    def close(self, key: Key) -> None:
        self._batch_delay.removed(key)
        self._admission.leave(key)
        if (sequence := self._sequences.pop(key, None)) is not None:
            self._lose(sequence)

    def pause(self, stream: int, paused: bool) -> None:
        for key, sequence in self._sequences.items():
            if key.stream == stream:
                sequence.paused = paused

    def drain(self) -> None:
        self._draining = True

    @property
    def idle(self) -> bool:
        if self._draining and self._sequences:
            return False
        return not any(sequence.waits for sequence in self._sequences.values())

    @property
    def batch_delay_s(self) -> float:
        if self._draining:
            return 0.0
        here = [sequence for sequence in self._sequences.values() if sequence.waits]
        return self._batch_delay.delay_s(len(here), sum(sequence.leaves for sequence in here), self._clock())

    def request_yield(self, requested: bool) -> None:
        pass  # no work of a target's pass can be put off

    def working_on(self) -> Sequence[Key]:
        return self._batch

    @property
    def load(self) -> Load:
        sequences = list(self._sequences.values())
        used, total = self._verifier.cache_use()
        waiting = sum(s.waits for s in sequences)
        return Load(len(sequences), waiting, used, total, self._passes, rows=self._rows)

    def step(self, poll: Callable[[], None] = noop) -> Results:
        results = self._pass(poll)
        if self._draining:
            for key in [key for key, sequence in self._sequences.items() if sequence.pending is None]:
                self.close(key)
                results.append((key, Draining("this target is draining; replay the sequence on another one")))
        return results

    def _pass(self, poll: Callable[[], None]) -> list[tuple[Key, Verdict | SpecdecError]]:
        num_rows = {key: sequence.num_rows for key, sequence in self._sequences.items() if sequence.waits}
        turn = take_turns(self._sequences, num_rows, MAX_TREE_ROWS)
        # Memory goes to the oldest first.
        self._batch = [key for _, key in sorted((self._sequences[key].arrived, key) for key in turn)]
        if not self._batch:
            return []
        started = self._clock()
        outcomes = run_pass(self._verify, [self._sequences[key] for key in self._batch], self._lose)
        results: list[tuple[Key, Verdict | SpecdecError]] = []
        starved = False
        self._autonomous = {key for key in self._batch if self._sequences[key].pending is None}
        poll()  # early rounds arrive during the pass before them
        self._autonomous = set()
        for key, outcome in zip(self._batch, outcomes, strict=True):
            decision, timings = (outcome, Timings()) if isinstance(outcome, SpecdecError) else outcome
            if key not in self._sequences:
                continue  # closed during the pass
            if isinstance(decision, Preempted):
                starved = True
            elif isinstance(decision, SpecdecError):
                self.close(key)
                results.append((key, decision))
            elif decision is not None:
                sequence = self._sequences[key]
                results.append((key, self._commit(sequence, decision, started, timings)))
                if sequence.pending is None and not sequence.num_autonomous:
                    self._batch_delay.left(key, sequence.since)
        if starved:
            results.append(self._preempt())
        deferred, self._deferred = self._deferred, []
        for key, round_, arrived in deferred:
            try:
                self.submit(key, round_, arrived)
            except SpecdecError as error:
                self.close(key)
                results.append((key, error))
        return results

    def _verify(self, sequences: Sequence[_Sequence]) -> list[tuple[Decision | SpecdecError | None, Timings]]:
        started = self._clock()
        for sequence in sequences:
            if sequence.memory is None:  # lost in a pass that raised
                sequence.memory = self._verifier.open(sequence.open.spec)
        decisions, timings = self._verifier.verify([sequence.job for sequence in sequences])
        self._passes += 1
        self._rows += timings.rows
        took_s = self._clock() - started
        self._batch_delay.observe_pass(timings.rows, took_s)
        self._admission.passed(took_s)
        return [(decision, timings) for decision in decisions]

    def _lose(self, sequence: _Sequence) -> None:
        memory, sequence.memory = sequence.memory, None
        if memory is not None:
            self._verifier.close(memory)

    def _preempt(self) -> tuple[Key, SpecdecError]:
        """End one sequence, never the oldest one: of those preempted least often, the one with the youngest request.

        The slots of one sequence are mostly enough for all jobs without memory; if not, the next pass ends another.
        """
        oldest, *younger = sorted(self._sequences, key=lambda key: (self._sequences[key].arrived, key))
        youngest_first = list(reversed(younger)) or [oldest]
        victim = min(youngest_first, key=lambda key: self._sequences[key].open.num_preemptions)
        self.close(victim)
        return victim, Preempted("its KV slots were needed for other requests; replay it")

    def _commit(self, sequence: _Sequence, decision: Decision, started: float, timings: Timings) -> Verdict:
        if sequence.pending is not None:
            sequence.last = sequence.pending.number
            num_autonomous = sequence.base - sequence.pending.base
            sequence.num_autonomous = max(0, min(sequence.pending.num_autonomous - num_autonomous, MAX_AUTONOMOUS))
        else:
            sequence.num_autonomous = max(0, sequence.num_autonomous - len(decision.accepted) - 1)
        base, queue_us = sequence.base, int((started - sequence.since) * 1e6)
        tree = decision.self_draft or sequence.tree
        accepted = (
            decision.accepted if decision.self_draft else tuple(sequence.nodes[node] for node in decision.accepted)
        )
        committed = [*(tree.token_ids[node] for node in decision.accepted), decision.next_token]
        sequence.ids.extend(committed)
        sequence.answered()
        full = sequence.base >= self._verifier.info.context_length
        ends = full or not sequence.open.stop_token_ids.isdisjoint(committed)
        if ends:
            sequence.num_autonomous = 0
        dropped = self._begin_early(sequence, ends)
        sequence.since = self._clock()
        return Verdict(
            sequence.last,
            base,
            accepted,
            decision.next_token,
            replace(timings, queue_us=queue_us),
            sequence.num_autonomous,
            dropped,
            decision.refused,
            decision.logprobs,
            0 if sequence.last else decision.num_cached_tokens,
            None if sequence.last else decision.prompt_logprobs,
            decision.self_draft,
        )

    def _begin_early(self, sequence: _Sequence, ends: bool) -> int:
        """Make the early round the pending one, or drop it if its tree is used up. Its number if dropped, else 0."""
        early, sequence.early = sequence.early, None
        if early is None:
            return 0
        sequence.take(early)
        if sequence.tree and not (ends or self._draining):
            return 0
        sequence.answered()
        return early.number
