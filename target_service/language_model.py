"""A language model as a verifier: feeds trees, has them verified, keeps the KV of the accepted nodes.

Knows the model and its cache; does not know sampling (target_service.decision), rounds and streams.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial

from specdec.core.device import indices
from specdec.core.errors import PassFailed, Preempted, SpecdecError
from specdec.core.one_by_one import one_by_one
from specdec.core.rounds import (
    CACHE_SALT,
    GRAMMAR,
    LOGPROBS,
    RESTRICTIONS,
    SELF_DRAFT,
    TRANSFORMS,
    Logprobs,
    Timings,
)
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import EMPTY_TREE
from specdec.kvcache.block_pool import Move, PoolFullError
from specdec.passes.outputs import RowOutputs
from specdec.passes.prefill import rows_to_feed
from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner
from specdec.runner.pass_timer import PassTimer
from specdec.sampling.grammar import Grammars, wait_for_any
from specdec.sampling.state import SamplingState
from target_service.decision import decide
from target_service.job_rows import Memory, SlowGrammars, ends_with_root, prompt_rows, rows_kept, segment_of
from target_service.reports import output_logprobs, prompt_logprobs
from target_service.self_draft.trees import Growing, Passed, SelfDrafter
from target_service.verifier import Decision, Job

MOST_PROMPT_LOGITS = 64
"""Rows of prompts with logits in a pass: a row of logits is as long as the vocabulary."""

MOST_BLOCKS_PER_PASS = 4096
"""Blocks to look up in one pass, about 5 ms of work: no sequence waits for the long prompts of another request."""


class LmVerifier:
    """See target_service.verifier.Verifier. Of ``runner`` only info, backend, chunk, pool, new_cache, forward and
    move are used."""

    def __init__(
        self, runner: ModelRunner, self_drafter: SelfDrafter | None = None, grammars: Grammars | None = None
    ) -> None:
        """``self_drafter``: drafts for the target in its own process. ``grammars``: of a model with a tokenizer."""
        self._runner, self._self_drafter, self._grammars = runner, self_drafter, grammars
        self._slow_grammars = SlowGrammars()
        capabilities = (*runner.info.capabilities, TRANSFORMS, RESTRICTIONS, LOGPROBS, CACHE_SALT)
        capabilities = capabilities if grammars is None else (*capabilities, GRAMMAR)
        self.info = dataclasses.replace(runner.info, capabilities=capabilities)
        if self_drafter is not None:
            capabilities = (*capabilities, SELF_DRAFT)
            self.info = dataclasses.replace(
                self.info,
                capabilities=capabilities,
                self_draft=self_drafter.kind,
                self_draft_nodes=self_drafter.num_nodes,
            )

    @property
    def block_size(self) -> int:
        return self._runner.pool.block_size

    def open(self, spec: SequenceSpec) -> Memory:
        grammar = self._grammars.start(spec.sampling.grammar, spec.cache_salt) if self._grammars is not None else None
        memory = Memory(spec, grammar, None, self._runner.new_cache(spec.cache_salt))
        if grammar is None:
            self._begin(memory)
        return memory

    def _begin(self, memory: Memory) -> None:
        """Raises InvalidArgument for a bad grammar, or an output that does not follow it."""
        mask = memory.grammar.result().mask() if memory.grammar is not None else None
        memory.sampling = SamplingState(memory.spec, mask)
        memory.spec = dataclasses.replace(memory.spec, token_ids=())

    def close(self, memory: Memory) -> None:
        memory.cache.release()

    def cache_use(self) -> tuple[int, int]:
        return self._runner.pool.num_used, self._runner.pool.num_slots

    def verify(self, jobs: Sequence[Job]) -> tuple[list[Decision | SpecdecError | None], Timings]:
        outcome: list[Decision | SpecdecError | None]
        jobs, outcome = list(jobs), [None] * len(jobs)
        started = time.perf_counter()
        ready = self._take_in(jobs, outcome)
        drafted = self._drafted(jobs, ready)
        self_draft_s = time.perf_counter() - started
        started, timer = time.perf_counter(), PassTimer(self._runner.backend.device)
        fed = self._segments(jobs, ready, outcome)
        drafting = any(jobs[index].memory.self_draft is not None for index in fed)
        taps = self._self_drafter.taps if self._self_drafter is not None and drafting else None
        with taps.open() if taps is not None else nullcontext():
            outputs = dict(zip(fed, self._runner.forward(list(fed.values())), strict=True)) if fed else {}
        timer.stop()
        decisions = self._decisions(jobs, fed, outputs, outcome)
        for index in drafted & decisions.keys():
            decisions[index] = dataclasses.replace(decisions[index], self_draft=jobs[index].tree)
        kept = self._keep(jobs, fed, outputs, decisions, outcome)
        if self._self_drafter is not None and drafting:
            self._learn(self._self_drafter, jobs, fed, outputs, kept, decisions)
        pass_s = timer.elapsed_s()
        timings = Timings(
            pass_us=int(pass_s * 1e6),
            sample_us=int(max(0.0, time.perf_counter() - started - pass_s) * 1e6),
            rows=sum(len(segment.token_ids) for segment in fed.values()),
            sequences=len(fed),
            self_draft_us=int(self_draft_s * 1e6) if drafted else 0,
        )
        return outcome, timings

    def _take_in(self, jobs: list[Job], outcome: list[Decision | SpecdecError | None]) -> set[int]:
        """Count the ids of each job. Returns the indices of those that can be in this pass: the others have an error,
        a grammar that is not compiled yet, or one that has no time."""
        compiling = [job.memory.grammar for job in jobs if job.memory.sampling is None]
        if len(compiling) == len(jobs):
            wait_for_any(compiling)
        for index, job in enumerate(jobs):
            memory: Memory = job.memory
            try:
                if memory.sampling is None and memory.grammar is not None and memory.grammar.done():
                    self._begin(memory)
            except SpecdecError as error:
                outcome[index] = error
            if memory.sampling is not None:
                outcome[index] = memory.sampling.take_in(job.ids)
        ready = {i for i, job in enumerate(jobs) if job.memory.sampling is not None and outcome[i] is None}
        return self._slow_grammars.choose(jobs, ready, time.perf_counter())

    def _drafted(self, jobs: list[Job], ready: set[int]) -> set[int]:
        """Draft a tree for each of the ``jobs`` that want one. Returns their indices."""
        if self._self_drafter is None:
            return set()
        growing: dict[int, Callable[[], Growing]] = {}
        for index, job in enumerate(jobs):
            memory: Memory = job.memory
            if job.max_self_draft_nodes and memory.self_draft is None and not memory.self_draft_failed:
                memory.self_draft = self._self_drafter.open(memory.spec.cache_salt)
            if memory.self_draft is None or memory.sampling is None or index not in ready:
                continue
            if job.self_draft_nodes and not job.tree:
                most = min(job.self_draft_nodes, self.info.context_length - len(job.ids))
                growing[index] = partial(Growing, memory.self_draft, memory.cache, memory.sampling, job.ids, most)
        if not growing:
            return set()
        grow, drafted = self._self_drafter.grow, set()
        trees = one_by_one(lambda some: grow([make() for make in some]), list(growing.values()))
        for index, tree in zip(growing, trees, strict=True):
            if isinstance(tree, SpecdecError):
                _drafts_no_more(jobs[index].memory)
            elif tree:
                jobs[index] = dataclasses.replace(jobs[index], tree=tree)
                drafted.add(index)
        return drafted

    def _learn(
        self,
        self_drafter: SelfDrafter,
        jobs: Sequence[Job],
        fed: Mapping[int, Segment],
        outputs: Mapping[int, RowOutputs],
        kept: Mapping[int, Sequence[int]],
        decisions: Mapping[int, Decision],
    ) -> None:
        """Tell what the pass computed for each sequence with self-drafts."""
        num_rows = sum(len(segment.token_ids) for segment in fed.values())
        states = self_drafter.taps.take(num_rows) if self_drafter.taps is not None else None
        start = 0
        for index, segment in fed.items():
            job, decision = jobs[index], decisions.get(index)
            if job.memory.self_draft is not None and index in kept:
                rows = None if states is None else states[indices([start + row for row in kept[index]], states.device)]
                read = outputs[index].behind(len(segment.logit_rows) - 1 - len(job.tree)) if decision else None
                cache, tree = job.memory.cache, job.tree
                passed = Passed(job.memory.self_draft, cache, job.ids, segment.num_context, rows, tree, read, decision)
                if any(one_by_one(lambda some: list(map(self_drafter.learn, some)), [passed])):
                    _drafts_no_more(job.memory)
            start += len(segment.token_ids)

    def _decisions(
        self,
        jobs: Sequence[Job],
        fed: Mapping[int, Segment],
        outputs: Mapping[int, RowOutputs],
        outcome: list[Decision | SpecdecError | None],
    ) -> dict[int, Decision]:
        """By index of the jobs with all text cached; a prefill that continues in the next pass has none. What raises
        has an error as its ``outcome``."""
        found = one_by_one(lambda some: self._decided(jobs, {index: fed[index] for index in some}, outputs), [*fed])
        errors = {index: each for index, each in zip(fed, found, strict=True) if isinstance(each, SpecdecError)}
        for index, error in errors.items():
            outcome[index] = error
        return {index: each for index, each in zip(fed, found, strict=True) if isinstance(each, Decision)}

    def _decided(
        self, jobs: Sequence[Job], fed: Mapping[int, Segment], outputs: Mapping[int, RowOutputs]
    ) -> list[Decision | SpecdecError | None]:
        most = self._runner.backend.logits_per_call
        prompts = prompt_logprobs(jobs, fed, outputs, most)
        deciding = [index for index, segment in fed.items() if ends_with_root(segment, jobs[index])]
        rows = {i: outputs[i].behind(len(fed[i].logit_rows) - 1 - len(jobs[i].tree)) for i in deciding}
        found = decide([jobs[index] for index in deciding], list(rows.values()), self._runner.backend)
        decided = dict(zip(deciding, found, strict=True))
        decisions = {index: decision for index, decision in decided.items() if isinstance(decision, Decision)}
        for index, logprobs in output_logprobs(jobs, rows, decisions, most).items():
            decisions[index] = dataclasses.replace(decisions[index], logprobs=logprobs)
        for index, part in prompts.items():
            jobs[index].memory.prompt_logprobs.append(part)
        for index, decision in decisions.items():
            memory = jobs[index].memory
            parts, memory.prompt_logprobs = memory.prompt_logprobs, []
            if parts or memory.num_cached:
                told = {
                    "prompt_logprobs": Logprobs.joined(parts) if parts else None,
                    "num_cached_tokens": memory.num_cached,
                }
                decisions[index] = dataclasses.replace(decision, **told)
        return [decisions.get(index, decided.get(index)) for index in fed]

    def _keep(
        self,
        jobs: Sequence[Job],
        fed: Mapping[int, Segment],
        outputs: Mapping[int, RowOutputs],
        decisions: Mapping[int, Decision],
        outcome: list[Decision | SpecdecError | None],
    ) -> dict[int, list[int]]:
        """Keep the KV of committed text and accepted nodes. A decision becomes the outcome if these rows are sound.
        Returns the rows of each segment that were kept."""
        moves: list[Move] = []
        every: dict[int, list[int]] = {}
        for index, segment in fed.items():
            if outcome[index] is not None:
                continue
            decision = decisions.get(index)
            kept = rows_kept(segment, jobs[index], decision)
            sound = outputs[index].sound  # read after the decisions, so that the device does not idle between the two
            if not all(sound[row] for row in kept):
                outcome[index] = PassFailed("the model computes NaN or infinity for the text of this sequence")
                continue
            every[index] = kept
            moves += jobs[index].memory.cache.keep(kept)
            outcome[index] = decision
        self._runner.move(moves)
        for index in fed:
            memory: Memory = jobs[index].memory
            # Others find a block once it has the head's rows as well.
            num_rows = (
                None
                if self._self_drafter is None or memory.self_draft is None
                else self._self_drafter.num_rows(memory.self_draft)
            )
            memory.cache.remember(jobs[index].ids[: 0 if memory.self_draft_failed else num_rows])
        return every

    def _attach(self, jobs: list[Job], ready: set[int]) -> list[int]:
        """Look up the texts that are not cached yet, MOST_BLOCKS_PER_PASS blocks of them. Returns the indices of the
        ``ready`` jobs of which nothing is left to look up; the others wait for the next pass."""
        pool = self._runner.pool
        most, attached = pool.num_looked_up + MOST_BLOCKS_PER_PASS, []
        for index, job in enumerate(jobs):
            cache = job.memory.cache
            if index not in ready:
                continue
            # What is cached has no logits.
            if len(job.ids) - len(cache) > 1 and not prompt_rows(job, len(cache)):
                before = len(cache)
                self._runner.move(cache.attach(job.ids, most - pool.num_looked_up))
                job.memory.num_cached += len(cache) - before
                if pool.num_looked_up == most:
                    continue
            attached.append(index)
        return attached

    def _segments(
        self, jobs: list[Job], ready: set[int], outcome: list[Decision | SpecdecError | None]
    ) -> dict[int, Segment]:
        """The segments of the pass, by index of the ``ready`` jobs. A job with no memory for its text gets the outcome
        Preempted. A job with no memory for its tree loses the tree in ``jobs``: texts come first."""
        attached = self._attach(jobs, ready)
        fed: dict[int, int] = {}  # rows of text
        texts = [(jobs[index].memory.cache, jobs[index].ids) for index in attached]
        prompt_logits = MOST_PROMPT_LOGITS
        for index, num_rows in zip(attached, rows_to_feed(texts, self._runner.chunk.rows), strict=True):
            if prompt_rows(jobs[index], len(jobs[index].memory.cache)):
                num_rows = min(num_rows, prompt_logits)
                prompt_logits -= num_rows
            try:
                if num_rows:
                    jobs[index].memory.cache.take(num_rows)
                    fed[index] = num_rows
            except PoolFullError as error:
                outcome[index] = Preempted(str(error))
        segments: dict[int, Segment] = {}
        for index, num_rows in fed.items():
            try:
                segments[index] = segment_of(jobs[index], num_rows)
            except PoolFullError:
                jobs[index] = dataclasses.replace(jobs[index], tree=EMPTY_TREE)
                segments[index] = segment_of(jobs[index], num_rows)
        return segments


def _drafts_no_more(memory: Memory) -> None:
    memory.self_draft, memory.self_draft_failed = None, True
