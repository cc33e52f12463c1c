"""The engine of the target service: applies rounds, chooses the sequences of each pass, and makes the verdicts.

Knows the protocol (bases, rounds, autonomous tokens, draining); does not know tensors (see Verifier). Imports no torch,
so that a table model can serve the same protocol.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from specdec.core.errors import ContextExceeded, Draining, InvalidArgument, OutOfStep, Preempted, SpecdecError
from specdec.core.limits import MAX_CHAIN_NODES, MAX_TREE_ROWS
from specdec.core.rounds import LOOKUP, Load, Round, TargetOpen, Timings, Verdict
from specdec.core.sequence import Method
from specdec.server.batch_delay import BatchDelay
from specdec.server.model_pass import run_pass
from specdec.server.step_loop import Key, Results, noop
from specdec.server.turns import Turns, Wait
from target_service.admission import Admission
from target_service.batch_share import BatchShare
from target_service.open_sequence import OpenSequence
from target_service.verifier import Decision, Verifier

_SELF_DRAFT_SALT = b"\0self_draft"
"""Only sequences with self-drafts have a head's keys and values in addition to the target's."""

_ADAPTER_SALT = b"\0adapter:"
"""Each adapter has keys and values of its own."""

_Outcome = tuple[Decision | SpecdecError | None, Timings]
"""Of a sequence in a pass, with the times of the pass."""

MAX_AUTONOMOUS = 64
"""Autonomous tokens that a round may allow in addition to its own. Ours ask for 32 (orchestrator/control)."""


class TargetEngine:
    """See specdec.server.step_loop.Engine. ``clock``: the clock of the argument ``arrived`` of ``submit``, seconds."""

    def __init__(
        self, verifier: Verifier[Any], max_sequences: int = 1024, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._verifier = verifier
        self._clock = clock
        self._admission = Admission(max_sequences, verifier.block_size)
        self._sequences: dict[Key, OpenSequence] = {}
        self._batch_delay = BatchDelay()
        self._batch_share = BatchShare()
        self._turns = Turns()
        self._batch: list[Key] = []
        self._passes = self._rows = 0
        self._autonomous: set[Key] = set()  # sequences with an autonomous verdict in the pass at hand
        self._deferred: list[tuple[Key, Round, float | None]] = []  # rounds for them, submitted during the pass
        self._draining = False

    def open(self, key: Key, open_: TargetOpen) -> None:
        if self._draining:
            raise Draining("this target is draining; open the sequence on another one")
        if open_.adapter:
            salt = open_.spec.cache_salt + _ADAPTER_SALT + open_.adapter.encode()
            open_ = replace(open_, spec=replace(open_.spec, cache_salt=salt))
        spec, limit = open_.spec, self._verifier.info.context_length
        if len(spec.token_ids) >= limit:
            raise ContextExceeded(f"{len(spec.token_ids)} token ids leave no room to generate in a context of {limit}")
        now = self._clock()
        arrived = now - open_.age_s + spec.priority.behind_s
        _, num_slots = self._verifier.cache_use()
        self._admission.check(spec, arrived=arrived, now=now, num_slots=num_slots)
        if open_.max_self_draft_nodes and self._verifier.info.self_draft != LOOKUP:
            spec = replace(spec, cache_salt=spec.cache_salt + _SELF_DRAFT_SALT)
        state, ids = self._verifier.open(spec), array("I", spec.token_ids)
        sequence = OpenSequence(replace(open_, spec=spec), state, ids, arrived=arrived, since=now)
        self._sequences[key] = sequence
        sequence.begin(Round(0, len(ids)))
        self._admission.enter(key, open_.spec, ids)

    def submit(self, key: Key, round_: Round, arrived: float | None = None) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        if key in self._autonomous:
            self._deferred.append((key, round_, arrived))
            return
        self._check(sequence, round_)
        if sequence.pending is not None:
            sequence.early = round_
            return
        sequence.begin(round_)
        arrived = self._clock() if arrived is None else arrived
        self._batch_delay.returned(key, arrived)
        # A round that arrives during autonomous decoding waits from the last verdict on.
        sequence.since = max(arrived, sequence.since)

    def _check(self, sequence: OpenSequence, round_: Round) -> None:
        """Raise unless ``round_`` may be the next one, or the early one behind the pending one."""
        spec, before, tree = sequence.open.spec, sequence.pending, round_.tree
        if before is not None and (sequence.early or not tree or not spec.keyed_by_token):
            raise OutOfStep(f"round {before.number} is unanswered; wait for its verdict")
        if round_.number != (expected := 1 + (sequence.last if before is None else before.number)):
            raise OutOfStep(f"round {expected} was expected, not {round_.number}")
        if not spec.num_prompt_tokens <= round_.base <= sequence.base:
            raise OutOfStep(f"base {sequence.base} was expected, not {round_.base}")
        if tree and not spec.keyed_by_token:
            if round_.base != sequence.base:
                raise OutOfStep(f"base {sequence.base} was expected, not {round_.base}, with {spec.method.value}")
            if not tree.is_chain or len(tree) > MAX_CHAIN_NODES:
                problem = f"{spec.method.value} verification takes chains only, of at most {MAX_CHAIN_NODES} nodes"
                raise InvalidArgument([("tree", problem)])
        if tree.draft_probs and spec.method is Method.COUPLED:
            raise InvalidArgument([("tree.draft_probs", "coupled verification takes no distributions")])
        if round_.self_draft_nodes > (max_nodes := sequence.open.max_self_draft_nodes):
            problem = f"at most {max_nodes} (the open), not {round_.self_draft_nodes}"
            raise InvalidArgument([("self_draft_nodes", problem)])
        limit = self._verifier.info.context_length
        if sequence.base >= limit:
            raise ContextExceeded(f"the sequence has reached the end of the context of {limit}")
        if tree and round_.base + max(tree.depths) >= limit:
            raise ContextExceeded(f"the tree reaches beyond the context of {limit}")

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
        # Batch requests do not keep others waiting.
        batch = frozenset(key for key, sequence in self._sequences.items() if sequence.is_batch)
        ignored = batch if not all(sequence.is_batch for sequence in here) else frozenset()
        num_leaving = sum(sequence.leaves for sequence in here)
        return self._batch_delay.delay_s(len(here), num_leaving, self._clock(), ignored=ignored)

    def request_yield(self, requested: bool) -> None:
        pass  # no work of a target's pass can be put off

    def working_on(self) -> Sequence[Key]:
        return self._batch

    @property
    def load(self) -> Load:
        sequences = list(self._sequences.values())
        used, total = self._verifier.cache_use()
        waiting = sum(sequence.waits for sequence in sequences)
        return Load(len(sequences), waiting, used, kv_slots_total=total, passes=self._passes, rows=self._rows)

    def step(self, poll: Callable[[], None] = noop) -> Results:
        self._batch = self._choose()
        results: list[tuple[Key, Verdict | SpecdecError]] = []
        if self._batch:
            started = self._clock()
            results += self._commit(self._run(poll), started)
            results += self._submit_deferred()
        if self._draining:
            for key in [key for key, sequence in self._sequences.items() if sequence.pending is None]:
                results.append(self._end(key, Draining("this target is draining; replay the sequence on another one")))
        return results

    def _choose(self) -> list[Key]:
        """The sequences of the next pass, the oldest first: they get memory in this order."""
        waiting = {key: sequence for key, sequence in self._sequences.items() if sequence.waits}
        num_rows = sum(sequence.num_rows for sequence in waiting.values())
        if num_rows > MAX_TREE_ROWS or any(sequence.is_batch for sequence in waiting.values()):
            now = self._clock()
            waits = {key: Wait(s.num_rows, s.open.spec.priority, now - s.since) for key, s in waiting.items()}

            def affords(key: Key) -> bool:
                return self._batch_share.affords(waiting[key].num_rows_and_prompt)

            turn = self._turns.take(self._sequences, waits, MAX_TREE_ROWS, affords=affords)
        else:
            turn = list(waiting)
        return sorted(turn, key=lambda key: (self._sequences[key].arrived, key))

    def _run(self, poll: Callable[[], None]) -> list[_Outcome | SpecdecError]:
        """The outcome of each sequence of the batch. Early rounds arrive during the pass before them."""
        outcomes = run_pass(self._verify, [self._sequences[key] for key in self._batch], self._lose)
        self._autonomous = {key for key in self._batch if self._sequences[key].pending is None}
        poll()
        self._autonomous = set()
        return outcomes

    def _verify(self, sequences: Sequence[OpenSequence]) -> list[_Outcome]:
        started = self._clock()
        for sequence in sequences:
            if sequence.state is None:
                sequence.state = self._verifier.open(sequence.open.spec)
        decisions, timings = self._verifier.verify([sequence.job for sequence in sequences])
        self._passes += 1
        self._rows += timings.rows
        took_s = self._clock() - started
        self._batch_delay.observe_pass(timings.rows, took_s)
        with_others = not all(sequence.is_batch for sequence in sequences)
        self._batch_share.observe_pass(timings.rows, took_s, with_others)
        self._admission.passed(took_s)
        return [(decision, timings) for decision in decisions]

    def _commit(
        self, outcomes: Sequence[_Outcome | SpecdecError], started: float
    ) -> list[tuple[Key, Verdict | SpecdecError]]:
        results: list[tuple[Key, Verdict | SpecdecError]] = []
        starved = False
        for key, outcome in zip(self._batch, outcomes, strict=True):
            if (sequence := self._sequences.get(key)) is None:
                continue  # closed during the pass
            decision, timings = (outcome, Timings()) if isinstance(outcome, SpecdecError) else outcome
            if isinstance(decision, Preempted):
                starved = True
            elif isinstance(decision, SpecdecError):
                results.append(self._end(key, decision))
            elif decision is not None:
                timings = replace(timings, queue_us=int((started - sequence.since) * 1e6))
                results.append((key, self._extend(sequence, decision, timings)))
                if sequence.pending is None and not sequence.num_autonomous:
                    self._batch_delay.left(key, sequence.since)
        if starved:
            results.append(self._preempt())
        return results

    def _submit_deferred(self) -> list[tuple[Key, SpecdecError]]:
        deferred, self._deferred = self._deferred, []
        errors = []
        for key, round_, arrived in deferred:
            try:
                self.submit(key, round_, arrived)
            except SpecdecError as error:
                errors.append(self._end(key, error))
        return errors

    def _end(self, key: Key, error: SpecdecError) -> tuple[Key, SpecdecError]:
        self.close(key)
        return key, error

    def _lose(self, sequence: OpenSequence) -> None:
        state, sequence.state = sequence.state, None
        if state is not None:
            self._verifier.close(state)

    def _preempt(self) -> tuple[Key, SpecdecError]:
        """End one sequence, never the oldest one: of those preempted least often, the one with the youngest request.

        The slots of one sequence are mostly enough for all jobs without memory; if not, the next pass ends another.
        """
        oldest, *younger = sorted(self._sequences, key=lambda key: (self._sequences[key].arrived, key))
        youngest_first = list(reversed(younger)) or [oldest]
        victim = min(youngest_first, key=lambda key: self._sequences[key].open.num_preemptions)
        return self._end(victim, Preempted("its KV slots were needed for other requests; replay it"))

    def _extend(self, sequence: OpenSequence, decision: Decision, timings: Timings) -> Verdict:
        """Commit the tokens of a decision. Returns the verdict on the round, or the next autonomous one."""
        base, nodes = sequence.base, sequence.nodes
        if sequence.pending is not None:
            sequence.last = sequence.pending.number
            num_autonomous = sequence.pending.num_autonomous - (base - sequence.pending.base)
            sequence.num_autonomous = max(0, min(num_autonomous, MAX_AUTONOMOUS))
        else:
            sequence.num_autonomous = max(0, sequence.num_autonomous - len(decision.accepted) - 1)
        tree = decision.self_draft or sequence.tree
        committed = [*(tree.token_ids[node] for node in decision.accepted), decision.next_token]
        sequence.ids.extend(committed)
        sequence.answered()
        full = sequence.base >= self._verifier.info.context_length
        ends = full or not sequence.open.stop_token_ids.isdisjoint(committed)
        if ends:
            sequence.num_autonomous = 0
        dropped_round = self._begin_early(sequence, ends)
        sequence.since = self._clock()
        of_open = not sequence.last
        return Verdict(
            round=sequence.last,
            base=base,
            accepted=decision.accepted if decision.self_draft else tuple(nodes[node] for node in decision.accepted),
            next_token=decision.next_token,
            timings=timings,
            num_autonomous_left=sequence.num_autonomous,
            dropped_round=dropped_round,
            refused=decision.refused,
            logprobs=decision.logprobs,
            num_cached_tokens=decision.num_cached_tokens if of_open else 0,
            prompt_logprobs=decision.prompt_logprobs if of_open else None,
            self_draft=decision.self_draft,
        )

    def _begin_early(self, sequence: OpenSequence, ends: bool) -> int:
        """Make the early round the pending one, or drop it if its tree is used up. Its number if dropped, else 0."""
        early, sequence.early = sequence.early, None
        if early is None:
            return 0
        sequence.begin(early)
        if sequence.tree and not (ends or self._draining):
            return 0
        sequence.answered()
        return early.number
