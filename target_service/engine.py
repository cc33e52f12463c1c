"""The target's side of a round: which sequences wait, what they stand at, what their verdicts are.

Knows the protocol (bases, rounds, run-on, draining); refuses to know tensors: a Verifier has those. Imports no
torch, so that a model made of a table can stand behind the same protocol.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specdec.batching import Key, Results
from specdec.errors import (
    ContextExceeded,
    Draining,
    InvalidArgument,
    OutOfStep,
    Preempted,
    SpecdecError,
)
from specdec.gathering import Gathering
from specdec.portions import MAX_CHAIN_NODES, MAX_TREE_ROWS, take_turns
from specdec.rounds import Features, Load, ModelInfo, Round, Timings, Verdict
from specdec.sequence import Method, SequenceSpec
from specdec.tree import EMPTY_TREE, TokenTree
from target_service.admission import Admission

MOST_RUN_ON = 64
"""Verdicts that a round may have beside its own: nobody can have asked for them one by one."""


@dataclass(frozen=True, slots=True)
class TargetOpen:
    """A sequence as this service opens it."""

    spec: SequenceSpec
    stop_token_ids: frozenset[int] = frozenset()
    return_predictions: bool = False
    age_s: float = 0.0  # of the request; a replay keeps it
    num_preemptions: int = 0  # so far, of this sequence, anywhere
    return_features: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """One sequence of a pass. ``ids`` are all committed ids; the tree hangs from the last of them."""

    memory: Any
    ids: Sequence[int]
    tree: TokenTree
    return_features: bool = False


@dataclass(frozen=True, slots=True)
class Decision:
    """What the target made of a job: accepted nodes, root downwards, the token after them, its own token at the
    root and at each node (empty where the method has none; the root's alone where there was no memory for the tree),
    and if asked for the root's and the accepted nodes' features."""

    accepted: tuple[int, ...]
    next_token: int
    predictions: tuple[int, ...] = ()
    features: Features | None = None


class Verifier(Protocol):
    """The model, its KV cache and the sampling."""

    info: ModelInfo

    @property
    def block_size(self) -> int:
        """Full blocks of so many equal ids, after equal text, are in the KV cache once; 0: nothing is shared."""

    def open(self, spec: SequenceSpec) -> Any:
        """The memory of a new sequence; it takes no KV slots yet, which only passes do."""

    def close(self, memory: Any) -> None: ...

    def verify(self, jobs: Sequence[Job]) -> tuple[Sequence[Decision | SpecdecError | None], Timings]:
        """One pass; who is first in ``jobs`` gets memory first, and a tree only what all texts leave.

        An error ends its sequence alone, but Preempted says that there was no memory for this job: some sequence's
        is taken, and the job comes again. None: a long prefill goes on in the next pass.
        """

    def cache_use(self) -> tuple[int, int]:
        """KV slots taken and in total."""


@dataclass(slots=True)
class _Sequence:
    open: TargetOpen
    memory: Any
    ids: list[int]
    pending: Round | None  # the open is round 0 with an empty tree
    arrived: float  # when its request did
    since: float  # it waits, or waited last
    run_on: int = 0
    last: int = 0
    held: bool = False

    @property
    def base(self) -> int:
        return len(self.ids)

    @property
    def waits(self) -> bool:
        return self.pending is not None or (self.run_on > 0 and not self.held)

    @property
    def num_rows(self) -> int:
        """In a pass, at most, beside its prompt."""
        return 1 if self.pending is None else 1 + len(self.pending.tree)


class TargetEngine:
    """See specdec.batching.Engine. ``clock`` is that of ``submit``'s ``arrived``."""

    def __init__(
        self, verifier: Verifier, max_sequences: int = 1024, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._verifier = verifier
        self._clock = clock
        self._admission = Admission(max_sequences, verifier.block_size)
        self._sequences: dict[Key, _Sequence] = {}
        self._gathering = Gathering()
        self._batch: list[Key] = []
        self._passes = self._rows = 0
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
        memory = self._verifier.open(open_.spec)
        ids = list(open_.spec.token_ids)
        self._sequences[key] = _Sequence(open_, memory, ids, Round(0, len(ids)), arrived, now)
        self._admission.enter(key, open_.spec, ids)

    def submit(self, key: Key, round_: Round, arrived: float | None = None) -> None:
        sequence = self._sequences.get(key)
        if sequence is None:
            return
        if sequence.pending is not None:
            raise OutOfStep(f"round {sequence.pending.number} is unanswered; wait for its verdict")
        if round_.number != sequence.last + 1:
            raise OutOfStep(f"round {sequence.last + 1} was expected, not {round_.number}")
        spec = sequence.open.spec
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
        limit = self._verifier.info.context_length
        if sequence.base >= limit:
            raise ContextExceeded(f"the sequence has reached the end of the context of {limit}")
        if round_.tree and round_.base + max(round_.tree.depths) >= limit:
            raise ContextExceeded(f"the tree reaches beyond the context of {limit}")
        sequence.pending = round_
        sequence.run_on = 0
        arrived = self._clock() if arrived is None else arrived
        self._gathering.back(key, arrived)
        # A round that comes while the target goes on has waited since the verdict before it.
        sequence.since = max(arrived, sequence.since)

    def close(self, key: Key) -> None:
        self._gathering.gone(key)
        self._admission.leave(key)
        if (sequence := self._sequences.pop(key, None)) is not None:
            self._verifier.close(sequence.memory)

    def hold(self, stream: int, held: bool) -> None:
        for key, sequence in self._sequences.items():
            if key.stream == stream:
                sequence.held = held

    def drain(self) -> None:
        self._draining = True

    @property
    def idle(self) -> bool:
        if self._draining and self._sequences:
            return False
        return not any(sequence.waits for sequence in self._sequences.values())

    @property
    def rest_s(self) -> float:
        if self._draining:
            return 0.0
        rows = [sequence.num_rows for sequence in self._sequences.values() if sequence.waits]
        return self._gathering.rest_s(len(rows), sum(rows), self._clock())

    def working_on(self) -> Sequence[Key]:
        return self._batch

    @property
    def load(self) -> Load:
        sequences = list(self._sequences.values())
        used, total = self._verifier.cache_use()
        waiting = sum(s.waits for s in sequences)
        return Load(len(sequences), waiting, used, total, self._passes, rows=self._rows)

    def step(self) -> Results:
        results = self._pass()
        if self._draining:
            for key in [key for key, sequence in self._sequences.items() if sequence.pending is None]:
                self.close(key)
                results.append((key, Draining("this target is draining; replay the sequence on another one")))
        return results

    def _pass(self) -> list[tuple[Key, Verdict | SpecdecError]]:
        num_rows = {key: sequence.num_rows for key, sequence in self._sequences.items() if sequence.waits}
        turn = take_turns(self._sequences, num_rows, MAX_TREE_ROWS)
        # Memory goes to the oldest first.
        self._batch = [key for _, key in sorted((self._sequences[key].arrived, key) for key in turn)]
        if not self._batch:
            return []
        started = self._clock()
        current = [_current_tree(self._sequences[key]) for key in self._batch]
        jobs = [
            Job(sequence.memory, sequence.ids, tree, sequence.open.return_features)
            for sequence, (tree, _) in zip((self._sequences[key] for key in self._batch), current, strict=True)
        ]
        decisions, timings = self._verifier.verify(jobs)
        self._passes += 1
        self._rows += timings.rows
        took_s = self._clock() - started
        self._gathering.passed(timings.rows, took_s, started)
        self._admission.passed(took_s)
        results: list[tuple[Key, Verdict | SpecdecError]] = []
        starved = False
        for key, (tree, nodes), decision in zip(self._batch, current, decisions, strict=True):
            if isinstance(decision, Preempted):
                starved = True
            elif isinstance(decision, SpecdecError):
                self.close(key)
                results.append((key, decision))
            elif decision is not None:
                sequence = self._sequences[key]
                results.append((key, self._commit(sequence, tree, nodes, decision, started, timings)))
                if not sequence.run_on:
                    self._gathering.told(key, sequence.since)
        if starved:
            results.append(self._preempt())
        return results

    def _preempt(self) -> tuple[Key, SpecdecError]:
        """End one sequence, never the oldest: whose request was preempted least often, of those the last to arrive.

        What one gives back is mostly enough for all that starve; if not, the next pass ends another.
        """
        oldest, *younger = sorted(self._sequences, key=lambda key: (self._sequences[key].arrived, key))
        youngest_first = list(reversed(younger)) or [oldest]
        victim = min(youngest_first, key=lambda key: self._sequences[key].open.num_preemptions)
        self.close(victim)
        return victim, Preempted("its KV slots were needed for other requests; replay it")

    def _commit(
        self,
        sequence: _Sequence,
        tree: TokenTree,
        nodes: Sequence[int],
        decision: Decision,
        started: float,
        timings: Timings,
    ) -> Verdict:
        if sequence.pending is not None:
            sequence.last = sequence.pending.number
            came_unasked = sequence.base - sequence.pending.base
            sequence.run_on = max(0, min(sequence.pending.run_on - came_unasked, MOST_RUN_ON))
            sequence.pending = None
        else:
            sequence.run_on -= 1
        queue_us = int((started - sequence.since) * 1e6)
        committed = [*(tree.token_ids[node] for node in decision.accepted), decision.next_token]
        full = sequence.base + len(committed) >= self._verifier.info.context_length
        if full or not sequence.open.stop_token_ids.isdisjoint(committed):
            sequence.run_on = 0
        verdict = Verdict(
            sequence.last,
            sequence.base,
            tuple(nodes[node] for node in decision.accepted),
            decision.next_token,
            decision.predictions if sequence.open.return_predictions else (),
            Timings(queue_us, timings.pass_us, timings.sample_us, timings.rows, timings.sequences),
            decision.features,
            sequence.run_on,
        )
        sequence.ids.extend(committed)
        sequence.since = self._clock()
        return verdict


def _current_tree(sequence: _Sequence) -> tuple[TokenTree, tuple[int, ...]]:
    """What is left of the pending tree at the current base, and each node's index in the tree as it was sent."""
    if sequence.pending is None:
        return EMPTY_TREE, ()
    tree = sequence.pending.tree
    node = tree.walk(sequence.ids[sequence.pending.base :])
    return (EMPTY_TREE, ()) if node is None else tree.below(node)
