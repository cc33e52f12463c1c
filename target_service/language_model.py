"""A language model as a verifier: feeds trees, has them verified, keeps the KV of the accepted nodes.

Knows the model and its cache; does not know sampling (target_service.decision), rounds and streams.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

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
from specdec.passes.prefill import rows_to_feed
from specdec.runner.model_runner import ModelRunner
from specdec.runner.pass_timer import PassTimer
from specdec.sampling.grammar import Grammars, wait_for_any
from target_service.decision import decide
from target_service.reports import output_logprobs, prompt_logprobs
from target_service.self_draft.trees import DraftRequest, Passed, SelfDrafter
from target_service.slow_grammars import SlowGrammars
from target_service.tasks import LmState, Task
from target_service.verifier import Decision, Job

MAX_PROMPT_LOGITS = 64
"""Rows of prompts with logits in a pass: a row of logits is as long as the vocabulary."""

MAX_BLOCKS_PER_PASS = 4096
"""Blocks to look up in one pass, about 5 ms of work: no sequence waits for the long prompts of another request."""


class LmVerifier:
    """See target_service.verifier.Verifier. Of ``runner`` only info, backend, chunk, pool, new_cache, forward and
    move are used."""

    def __init__(
        self, runner: ModelRunner, self_drafter: SelfDrafter[Any] | None = None, grammars: Grammars | None = None
    ) -> None:
        """``self_drafter``: drafts for the target in its own process. ``grammars``: of a model with a tokenizer."""
        self._runner, self._self_drafter, self._grammars = runner, self_drafter, grammars
        self._slow_grammars = SlowGrammars()
        capabilities = (*runner.info.capabilities, TRANSFORMS, RESTRICTIONS, LOGPROBS, CACHE_SALT)
        capabilities = capabilities if grammars is None else (*capabilities, GRAMMAR)
        self.info = dataclasses.replace(runner.info, capabilities=capabilities)
        if self_drafter is not None:
            self.info = dataclasses.replace(
                self.info,
                capabilities=(*capabilities, SELF_DRAFT),
                self_draft=self_drafter.kind,
                fixed_self_draft_nodes=self_drafter.num_nodes,
            )

    @property
    def block_size(self) -> int:
        return self._runner.pool.block_size

    def open(self, spec: SequenceSpec) -> LmState:
        grammar = self._grammars.start(spec.sampling.grammar, spec.cache_salt) if self._grammars is not None else None
        state = LmState(self._runner.new_cache(spec.cache_salt), grammar)
        if grammar is None:
            state.begin(spec)
        return state

    def close(self, state: LmState) -> None:
        state.cache.release()

    def cache_use(self) -> tuple[int, int]:
        return self._runner.pool.num_used, self._runner.pool.num_slots

    def verify(self, jobs: Sequence[Job[LmState]]) -> tuple[list[Decision | SpecdecError | None], Timings]:
        started = time.perf_counter()
        tasks = list(map(Task, jobs))
        ready = self._take_in(tasks)
        drafted = self._draft(ready)
        self_draft_s = time.perf_counter() - started
        started, timer = time.perf_counter(), PassTimer(self._runner.backend.device)
        fed = self._feed(ready)
        self._compute(fed)
        timer.stop()
        self._decide(fed)
        self._keep(fed)
        self._learn(fed)
        pass_s = timer.elapsed_s()
        timings = Timings(
            pass_us=int(pass_s * 1e6),
            sample_us=int(max(0.0, time.perf_counter() - started - pass_s) * 1e6),
            rows=sum(len(task.segment.token_ids) for task in fed),
            sequences=len(fed),
            self_draft_us=int(self_draft_s * 1e6) if drafted else 0,
        )
        return [task.error or task.decision for task in tasks], timings

    def _take_in(self, tasks: Sequence[Task]) -> list[Task]:
        """Count the ids of each. Returns those that can be in this pass: the others have an error, a grammar that is
        not compiled yet, or one that has no time."""
        if all(task.state.sampling is None for task in tasks):
            wait_for_any([task.state.grammar for task in tasks if task.state.grammar is not None])
        for task in tasks:
            state = task.state
            try:
                if state.sampling is None and state.grammar is not None and state.grammar.done():
                    state.begin(task.job.open.spec)
            except SpecdecError as error:
                task.error = error
            if state.sampling is not None:
                task.error = state.sampling.take_in(task.job.ids)
        ready = [task for task in tasks if task.state.sampling is not None and task.error is None]
        return self._slow_grammars.choose(ready, time.perf_counter())

    def _draft(self, tasks: Sequence[Task]) -> bool:
        """Draft a tree for each that wants one. Returns whether there is any."""
        if (self_drafter := self._self_drafter) is None:
            return False
        for task in tasks:
            state, open_ = task.state, task.job.open
            if open_.max_self_draft_nodes and state.self_draft is None and not state.self_draft_failed:
                state.self_draft = self_drafter.open(open_.spec.cache_salt)
        drafting = [task for task in tasks if task.state.self_draft is not None]
        wanting = [task for task in drafting if task.self_draft_nodes and not task.tree]
        if not wanting:
            return False
        trees = one_by_one(self_drafter.grow, list(map(self._request, wanting)))
        for task, tree in zip(wanting, trees, strict=True):
            if isinstance(tree, SpecdecError):
                task.state.stop_drafting()
            else:
                task.tree, task.self_drafted = tree, bool(tree)
        return any(task.self_drafted for task in wanting)

    def _request(self, task: Task) -> DraftRequest[Any]:
        state, ids = task.state, task.job.ids
        max_nodes = min(task.self_draft_nodes, self.info.context_length - len(ids))
        return DraftRequest(state.self_draft, state.cache, task.sampling, ids=ids, max_nodes=max_nodes)

    def _feed(self, ready: Sequence[Task]) -> list[Task]:
        """Those of the pass, with their segments. One without memory for its text is Preempted, one without memory for
        its tree loses it: texts come first."""
        tasks = self._attach(ready)
        texts = [(task.state.cache, task.job.ids) for task in tasks]
        num_prompt_logits = MAX_PROMPT_LOGITS
        fed: dict[Task, int] = {}  # rows of text
        for task, num_rows in zip(tasks, rows_to_feed(texts, self._runner.chunk.rows), strict=True):
            if task.num_prompt_rows(len(task.state.cache)):
                num_rows = min(num_rows, num_prompt_logits)
                num_prompt_logits -= num_rows
            try:
                if num_rows:
                    task.state.cache.take(num_rows)
                    fed[task] = num_rows
            except PoolFullError as error:
                task.error = Preempted(str(error))
        for task, num_rows in fed.items():
            task.feed(num_rows)
        return list(fed)

    def _attach(self, tasks: Sequence[Task]) -> list[Task]:
        """Look up the texts that are not cached yet, MAX_BLOCKS_PER_PASS blocks of them. Returns those of which nothing
        is left to look up; the others wait for the next pass."""
        pool = self._runner.pool
        limit, attached = pool.num_looked_up + MAX_BLOCKS_PER_PASS, []
        for task in tasks:
            cache, ids = task.state.cache, task.job.ids
            # What is cached has no logits.
            if len(ids) - len(cache) > 1 and not task.num_prompt_rows(len(cache)):
                before = len(cache)
                self._runner.move(cache.attach(ids, limit - pool.num_looked_up))
                task.state.num_cached += len(cache) - before
                if pool.num_looked_up == limit:
                    continue
            attached.append(task)
        return attached

    def _compute(self, tasks: Sequence[Task]) -> None:
        drafting = self._self_drafter is not None and any(task.state.self_draft is not None for task in tasks)
        taps = self._self_drafter.taps if self._self_drafter is not None and drafting else None
        with taps.open() if taps is not None else nullcontext():
            outputs = self._runner.forward([task.segment for task in tasks]) if tasks else []
        for task, rows in zip(tasks, outputs, strict=True):
            task.outputs = rows

    def _decide(self, tasks: Sequence[Task]) -> None:
        """A prefill that continues in the next pass has no decision. What raises has an error."""
        for task, error in zip(tasks, one_by_one(self._decided, tasks), strict=True):
            task.error = error

    def _decided(self, tasks: Sequence[Task]) -> list[SpecdecError | None]:
        """Set the decisions. Returns the errors."""
        logits_per_call = self._runner.backend.logits_per_call
        prompts = prompt_logprobs(tasks, logits_per_call)
        deciding = [task for task in tasks if task.ends_with_root]
        outcomes = decide(
            [task.case for task in deciding], [task.tree_outputs for task in deciding], self._runner.backend
        )
        pairs = list(zip(deciding, outcomes, strict=True))
        decisions = {task: outcome for task, outcome in pairs if isinstance(outcome, Decision)}
        errors = {task: outcome for task, outcome in pairs if isinstance(outcome, SpecdecError)}
        outputs = output_logprobs(decisions, logits_per_call)
        # From here on nothing raises: a part of a prompt must not count twice.
        for task, logprobs in prompts.items():
            task.state.prompt_logprobs.append(logprobs)
        for task, decision in decisions.items():
            parts, task.state.prompt_logprobs = task.state.prompt_logprobs, []
            task.decision = dataclasses.replace(
                decision,
                logprobs=outputs.get(task),
                prompt_logprobs=Logprobs.joined(parts) if parts else None,
                num_cached_tokens=task.state.num_cached,
                self_draft=task.tree if task.self_drafted else EMPTY_TREE,
            )
        return [errors.get(task) for task in tasks]

    def _keep(self, tasks: Sequence[Task]) -> None:
        """Keep the KV of committed text and accepted nodes, if these rows are sound."""
        moves: list[Move] = []
        for task in tasks:
            if task.error is not None:
                continue
            rows = task.rows_to_keep
            sound = task.outputs.sound  # read after the decisions, so that the device does not idle between the two
            if not all(sound[row] for row in rows):
                task.error = PassFailed("the model computes NaN or infinity for the text of this sequence")
                continue
            task.kept = rows
            moves += task.state.cache.keep(rows)
        self._runner.move(moves)
        for task in tasks:
            num_rows = 0 if task.state.self_draft_failed else None
            if self._self_drafter is not None and task.state.self_draft is not None:
                # Others find a block once it has the head's rows as well.
                num_rows = self._self_drafter.num_rows(task.state.self_draft)
            task.state.cache.remember(task.job.ids[:num_rows])

    def _learn(self, tasks: Sequence[Task]) -> None:
        """Tell the self-drafter what the pass computed for each sequence that it drafts for."""
        self_drafter = self._self_drafter
        if self_drafter is None or all(task.state.self_draft is None for task in tasks):
            return

        def learn(pairs: Sequence[tuple[Task, Passed]]) -> Sequence[None]:
            for task, passed in pairs:
                self_drafter.learn(task.state.self_draft, passed)
            return [None] * len(pairs)

        starts, num_rows = [], 0
        for task in tasks:
            starts.append(num_rows)
            num_rows += len(task.segment.token_ids)
        taps = self_drafter.taps.take(num_rows) if self_drafter.taps is not None else None
        for task, start in zip(tasks, starts, strict=True):
            if task.state.self_draft is None or task.kept is None:
                continue
            passed = Passed(
                cache=task.state.cache,
                ids=task.job.ids,
                start=task.segment.num_context,
                taps=None if taps is None else taps[indices([start + row for row in task.kept], taps.device)],
                tree=task.tree,
                outputs=task.tree_outputs if task.decision else None,
                decision=task.decision,
            )
            if any(one_by_one(learn, [(task, passed)])):
                task.state.stop_drafting()
