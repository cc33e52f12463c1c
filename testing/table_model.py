"""A table model: the next token is a function of the last tokens. No torch, adjustable costs, real services around it.

Knows the next token and the cost of a pass; everything else (streams, batching, rounds, replay) is the code that serves
real models. Greedy and coupled sampling only: the text depends on prefix and seed, never on the draft.
"""

from __future__ import annotations

import dataclasses
import fcntl
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from draft_service.drafter import DraftSequence
from specdec.core.errors import InvalidArgument, Preempted, SpecdecError
from specdec.core.rounds import AHEAD, CACHE_SALT, LOGPROBS, SELF_DRAFT, SIBLINGS, Logprobs, ModelInfo, Timings
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import EMPTY_TREE, ROOT, Candidate, TokenTree
from specdec.speculation.acceptance import PRIOR
from target_service.verifier import Decision, Job

_ORDER = 3
_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Table:
    """``acceptance``: the rate at which the draft's first candidate is the target's next token, a function of the text
    alone. ``runner_up``: the rate for its second candidate if the first is wrong. Third candidates are never right.

    The text repeats after ``period`` tokens; 0: never.
    """

    vocab_size: int = 1024
    acceptance: float = 0.8
    context_length: int = 65536
    period: int = 0
    runner_up: float = PRIOR[1]

    def next_token(self, spec: SequenceSpec, tail: Sequence[int], position: int) -> int:
        """The token that the target commits at ``position``, after a text that ends with ``tail``."""
        return self._hash(spec, tail, position, 1) % self.vocab_size

    def text(self, spec: SequenceSpec, max_tokens: int) -> list[int]:
        """The only right output ids."""
        ids = list(spec.token_ids)
        for _ in range(max_tokens):
            ids.append(self.next_token(spec, ids[-_ORDER:], len(ids)))
        return ids[spec.num_prompt_tokens :]

    def guess(self, spec: SequenceSpec, tail: Sequence[int], position: int) -> int:
        """The draft's first candidate at ``position``."""
        token = self.next_token(spec, tail, position)
        right = self._hash(spec, tail, position, 2) % 10_000 < self.acceptance * 10_000
        return token if right else (token + 1) % self.vocab_size

    def guesses(self, spec: SequenceSpec, tail: Sequence[int], position: int, count: int) -> list[int]:
        """The draft's first ``count`` candidates at ``position``, all different, the most likely first."""
        token, first = self.next_token(spec, tail, position), self.guess(spec, tail, position)
        right = self._hash(spec, tail, position, 3) % 10_000 < self.runner_up * 10_000
        others = [token if first != token and right else (token + 2) % self.vocab_size]
        others += [(token + 3 + index) % self.vocab_size for index in range(count)]
        return [first, *others][:count]

    def _hash(self, spec: SequenceSpec, tail: Sequence[int], position: int, salt: int) -> int:
        # The hash of a tuple of ints is the same in every process.
        seed = 0 if spec.sampling.greedy else spec.seed
        if self.period:
            position, tail = position % self.period, ()
        return hash((salt, seed, position, *tail[-_ORDER:]))

    def logprobs(self, ids: Sequence[int], start: int, spec: SequenceSpec, num_top: int) -> Logprobs:
        """Of the tokens from position ``start`` on. The next token of the target is the most likely one at each
        position, and each further one of the vocabulary e times less likely."""
        logprobs: list[float] = []
        top_ids: list[int] = []
        top_logprobs: list[float] = []
        for position in range(start, len(ids)):
            first = self.next_token(spec, ids[max(0, position - _ORDER) : position], position)
            highest = -(self._hash(spec, (), position, 4) % 64) / 64
            logprobs.append(highest - (ids[position] - first) % self.vocab_size)
            top_ids.extend((first + rank) % self.vocab_size for rank in range(num_top))
            top_logprobs.extend(highest - rank for rank in range(num_top))
        return Logprobs(logprobs, top_ids, top_logprobs)

    def info(self, name: str) -> ModelInfo:
        digest = f"{name}-{self.vocab_size}-{self.acceptance}"
        return ModelInfo(name, digest, self.vocab_size, "table", self.context_length)


@dataclass(frozen=True, slots=True)
class Poison:
    """What a pass does with a text that has one of these tokens: it raises, ends the process, or never ends."""

    fail_on_token: int | None = None
    crash_on_token: int | None = None
    hang_on_token: int | None = None

    def strike(self, ids: Sequence[int]) -> None:
        if self.crash_on_token in ids:
            os._exit(139)  # like a segmentation fault: nothing is logged or closed
        while self.hang_on_token in ids:
            time.sleep(60)
        if self.fail_on_token in ids:
            raise RuntimeError("an injected failure of the pass")


class Device:
    """What computes passes: it sleeps for ``seconds`` of their rows, as if it were a GPU.

    ``shared``: a file. Services with the same one have one device, and never work at the same time; empty: their own.
    """

    def __init__(self, seconds: Callable[[float], float], shared: str = "") -> None:
        self._seconds = seconds
        self._lock = os.open(shared, os.O_WRONLY | os.O_CREAT) if shared else None

    def compute(self, rows: int) -> None:
        seconds = self._seconds(rows)
        if not seconds:
            return
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        time.sleep(seconds)
        if self._lock is not None:
            fcntl.flock(self._lock, fcntl.LOCK_UN)


class Texts:
    """The blocks of computed texts, found again behind the same text and salt. Of more than ``num_blocks`` those go
    that were not used for longest."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks: dict[int, None] = {}

    def num_known(self, spec: SequenceSpec, ids: Sequence[int]) -> int:
        """Ids in known blocks at the beginning of ``ids``, of which the last one is always computed."""
        num_ids = 0
        for block in self._of(spec, ids[:-1]):
            if block not in self._blocks:
                break
            num_ids += _BLOCK
        return num_ids

    def add(self, spec: SequenceSpec, ids: Sequence[int]) -> None:
        for block in self._of(spec, ids) if self._num_blocks else ():
            self._blocks.pop(block, None)
            self._blocks[block] = None
        while len(self._blocks) > self._num_blocks:
            del self._blocks[next(iter(self._blocks))]

    def _of(self, spec: SequenceSpec, ids: Sequence[int]) -> Iterator[int]:
        block = hash(spec.cache_salt)
        for end in range(_BLOCK, len(ids) + 1, _BLOCK):
            block = hash((block, *ids[end - _BLOCK : end]))
            yield block


class TableVerifier:
    """See target_service.verifier.Verifier. A pass takes ``pass_s`` plus ``row_s`` per row, or as long as ``device``
    takes.

    A prefill of more than ``chunk_rows`` takes several passes."""

    block_size = 0

    def __init__(
        self,
        table: Table,
        num_slots: int = 1 << 20,
        pass_s: float = 0.0,
        row_s: float = 0.0,
        chunk_rows: int = 512,
        poison: Poison | None = None,
        self_drafts: bool = False,
        device: Device | None = None,
        cached_blocks: int = 0,
    ) -> None:
        """``self_drafts``: it drafts by itself, chains of the table's first guesses. ``cached_blocks``: blocks of
        texts that it finds again when they are opened."""
        self._poison = poison
        self._texts = Texts(cached_blocks)
        capabilities = (LOGPROBS, *([SELF_DRAFT] if self_drafts else []), *([CACHE_SALT] if cached_blocks else []))
        self.info = dataclasses.replace(
            table.info("table-target"), capabilities=capabilities, self_draft="table" if self_drafts else ""
        )
        self._table = table
        self._num_slots = num_slots
        self._num_used = 0
        self._device = device or Device(lambda rows: pass_s + row_s * rows)
        self._chunk_rows = chunk_rows

    def open(self, spec: SequenceSpec) -> TableMemory:
        return TableMemory(spec)

    def close(self, state: TableMemory) -> None:
        self._num_used -= state.num_cached
        state.num_cached = 0

    def cache_use(self) -> tuple[int, int]:
        return self._num_used, self._num_slots

    def verify(self, jobs: Sequence[Job[TableMemory]]) -> tuple[list[Decision | SpecdecError | None], Timings]:
        started = time.perf_counter()
        if self._poison is not None:
            for job in jobs:
                self._poison.strike(job.ids)
        for job in jobs:
            if job.state.num_found is None:
                job.state.num_found = job.state.num_cached = self._texts.num_known(job.state.spec, job.ids)
                self._num_used += job.state.num_found
        jobs = [self._drafted(job) if job.self_draft_nodes and not job.tree else job for job in jobs]
        num_rows = sum(min(len(job.ids) - job.state.num_cached + len(job.tree), self._chunk_rows) for job in jobs)
        self._device.compute(num_rows)
        decisions = [self._decide(job) for job in self._with_room(jobs)]
        pass_us = int((time.perf_counter() - started) * 1e6)
        return decisions, Timings(pass_us=pass_us, rows=num_rows, sequences=len(jobs))

    def _drafted(self, job: Job[TableMemory]) -> Job[TableMemory]:
        """With a self-draft."""
        text = list(job.ids[-_ORDER:])
        for position in range(len(job.ids), len(job.ids) + job.self_draft_nodes):
            text.append(self._table.guess(job.state.spec, text, position))
        return dataclasses.replace(job, tree=TokenTree.chain(text[-job.self_draft_nodes :]))

    def _with_room(self, jobs: Sequence[Job[TableMemory]]) -> Iterator[Job[TableMemory]]:
        """The jobs; a tree is dropped if the texts of all jobs leave no KV slots for it."""
        left = self._num_slots - self._num_used
        left -= sum(min(len(job.ids) - job.state.num_cached, self._chunk_rows) for job in jobs)
        for job in jobs:
            if len(job.tree) > left:
                job = dataclasses.replace(job, tree=EMPTY_TREE)
            left -= len(job.tree)
            yield job

    def _decide(self, job: Job[TableMemory]) -> Decision | SpecdecError | None:
        state = job.state
        if not state.spec.keyed_by_token:
            return InvalidArgument([("spec.method", "a table model supports greedy and coupled sampling only")])
        num_new = len(job.ids) - state.num_cached
        unfinished = num_new > 1 and num_new + len(job.tree) > self._chunk_rows
        # The last token, the root, is computed in the pass that decides.
        num_rows = min(num_new - 1, self._chunk_rows) if unfinished else num_new + len(job.tree)
        if self._num_used + num_rows > self._num_slots:
            return Preempted(f"{num_rows} KV slots needed, {self._num_slots - self._num_used} free")
        if unfinished:
            state.num_cached += num_rows
            self._num_used += num_rows
            return None
        text = list(job.ids[-_ORDER:])
        text_length = len(job.ids)
        accepted: list[int] = []
        node = ROOT
        while True:
            token = self._table.next_token(state.spec, text, text_length)
            child = job.tree.child(node, token) if job.tree else None
            if child is None:
                break
            accepted.append(child)
            node = child
            text.append(token)
            text_length += 1
        kept = num_new + len(accepted)
        state.num_cached += kept
        self._num_used += kept
        self_draft = job.tree if job.self_draft_nodes else EMPTY_TREE
        decision = Decision(tuple(accepted), token, num_cached_tokens=state.num_found or 0, self_draft=self_draft)
        if len(job.ids) // _BLOCK > state.num_added:
            state.num_added = len(job.ids) // _BLOCK
            self._texts.add(state.spec, job.ids)
        if job.open.num_logprobs is not None:
            committed = [*(job.tree.token_ids[node] for node in accepted), token]
            logprobs = self._table.logprobs([*job.ids, *committed], len(job.ids), state.spec, job.open.num_logprobs)
            decision = dataclasses.replace(decision, logprobs=logprobs)
        if job.open.num_prompt_logprobs is not None and not state.decided:
            prompt = job.ids[: state.spec.num_prompt_tokens]
            logprobs = self._table.logprobs(prompt, 1, state.spec, job.open.num_prompt_logprobs)
            decision = dataclasses.replace(decision, prompt_logprobs=logprobs)
        state.decided = True
        return decision


class TableDrafter:
    """See draft_service.drafter.Drafter. One node per sequence and step; each step takes ``step_s``, or as long as
    ``device`` takes."""

    def __init__(self, table: Table, step_s: float = 0.0, device: Device | None = None) -> None:
        self.info = dataclasses.replace(table.info("table-draft"), capabilities=(AHEAD, SIBLINGS))
        self._table = table
        self._device = device or Device(lambda rows: step_s)

    def open(self, spec: SequenceSpec) -> None:
        return None

    def close(self, memory: None) -> None: ...

    def request_yield(self, requested: bool) -> None: ...

    def cache_use(self) -> tuple[int, int]:
        return 0, 0

    def learn(self, sequences: Sequence[DraftSequence]) -> list[SpecdecError | bool]:
        return [True] * len(sequences)

    def grow(self, sequences: Sequence[DraftSequence]) -> list[list[Candidate]]:
        self._device.compute(len(sequences))
        return [sequence.tree.lacking(self._candidates(sequence)) for sequence in sequences]

    def _candidates(self, sequence: DraftSequence) -> list[Candidate]:
        candidates = []
        for branch in sequence.next_branches:
            path = sequence.tree.path_ids(branch.parent)
            tail = [*sequence.ids[-_ORDER:], *path][-_ORDER:]
            guesses = self._table.guesses(sequence.spec, tail, sequence.base + len(path), branch.num_children)
            candidates += [Candidate(branch.parent, token) for token in guesses]
        return candidates


@dataclass(slots=True)
class TableMemory:
    """The state of a sequence: its spec and the number of KV slots it holds."""

    spec: SequenceSpec
    num_cached: int = 0
    decided: bool = False  # its prompt is computed
    num_found: int | None = None  # ids that were computed before; None: not looked up yet
    num_added: int = 0  # blocks that later texts find
