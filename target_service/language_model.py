"""A language model as a verifier: feeds trees, has them verified, keeps the KV of the accepted nodes.

Knows the model and its cache; does not know sampling (target_service.decision), rounds and streams.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.core.errors import PassFailed, Preempted, SpecdecError
from specdec.core.rounds import CACHE_SALT, FEATURES, TRANSFORMS, Features, Timings
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import EMPTY_TREE
from specdec.kvcache.block_pool import Move, PoolFullError, SequenceCache
from specdec.passes.prefill import rows_to_feed
from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner
from specdec.sampling.state import SamplingState
from target_service.decision import decide
from target_service.verifier import Decision, Job


@dataclass(slots=True)
class _Memory:
    sampling: SamplingState
    cache: SequenceCache


class LmVerifier:
    """See target_service.verifier.Verifier. Of ``runner`` only info, backend, pool, new_cache, forward and move are
    used."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        capabilities = (*runner.info.capabilities, TRANSFORMS, FEATURES, CACHE_SALT)
        self.info = dataclasses.replace(runner.info, capabilities=capabilities)

    @property
    def block_size(self) -> int:
        return self._runner.pool.block_size

    def open(self, spec: SequenceSpec) -> _Memory:
        return _Memory(SamplingState(spec), self._runner.new_cache(spec.cache_salt))

    def close(self, memory: _Memory) -> None:
        memory.cache.release()

    def cache_use(self) -> tuple[int, int]:
        return self._runner.pool.num_used, self._runner.pool.num_slots

    def verify(self, jobs: Sequence[Job]) -> tuple[list[Decision | SpecdecError | None], Timings]:
        outcome: list[Decision | SpecdecError | None]
        jobs, outcome = list(jobs), [None] * len(jobs)
        started = time.perf_counter()
        for index, job in enumerate(jobs):
            outcome[index] = job.memory.sampling.take_in(job.ids)
        fed = self._segments(jobs, outcome)
        outputs = dict(zip(fed, self._runner.forward(list(fed.values())), strict=True)) if fed else {}
        passed = time.perf_counter()
        deciding = [index for index, segment in fed.items() if segment.logit_rows]
        decided = decide(
            [jobs[index] for index in deciding], [outputs[index] for index in deciding], self._runner.backend
        )
        decisions = dict(zip(deciding, decided, strict=True))
        moves: list[Move] = []
        for index, segment in fed.items():
            job, decision = jobs[index], decisions.get(index)  # None: its prefill continues in the next pass
            kept = _kept(segment, job, decision)
            sound = outputs[index].sound  # read after the decisions, so that the device does not idle between the two
            if not all(sound[row] for row in kept):
                outcome[index] = PassFailed("the model computes NaN or infinity for the text of this sequence")
                continue
            moves += job.memory.cache.keep(kept)
            if decision is not None and job.return_features:
                decision = dataclasses.replace(decision, features=_features(outputs[index].features, decision))
            outcome[index] = decision
        self._runner.move(moves)
        for index in fed:
            jobs[index].memory.cache.remember(jobs[index].ids)
        timings = Timings(
            pass_us=int((passed - started) * 1e6),
            sample_us=int((time.perf_counter() - passed) * 1e6),
            rows=sum(len(segment.token_ids) for segment in fed.values()),
            sequences=len(fed),
        )
        return outcome, timings

    def _segments(self, jobs: list[Job], outcome: list[Decision | SpecdecError | None]) -> dict[int, Segment]:
        """The segments of the pass, by index of the jobs without an ``outcome``. A job with no memory for its text gets
        the outcome Preempted. A job with no memory for its tree loses the tree in ``jobs``: texts come first."""
        for job in jobs:
            if len(job.ids) - len(job.memory.cache) > 1:
                self._runner.move(job.memory.cache.attach(job.ids))
        fed: dict[int, int] = {}  # rows of text
        for index, num_rows in enumerate(rows_to_feed([(job.memory.cache, job.ids) for job in jobs])):
            try:
                if num_rows and outcome[index] is None:
                    jobs[index].memory.cache.take(num_rows)
                    fed[index] = num_rows
            except PoolFullError as error:
                outcome[index] = Preempted(str(error))
        segments: dict[int, Segment] = {}
        for index, num_rows in fed.items():
            try:
                segments[index] = _segment(jobs[index], num_rows)
            except PoolFullError:
                jobs[index] = dataclasses.replace(jobs[index], tree=EMPTY_TREE)
                segments[index] = _segment(jobs[index], num_rows)
        return segments


def _kept(segment: Segment, job: Job, decision: Decision | None) -> list[int]:
    """The rows to keep in the cache: those of committed text and of accepted nodes."""
    if decision is None:
        return list(range(len(segment.token_ids)))
    first_node = len(segment.token_ids) - len(job.tree)
    return [*range(first_node), *(first_node + node for node in decision.accepted)]


def _features(rows: Tensor, decision: Decision) -> Features:
    """The features of the root and the accepted nodes, from ``rows`` [1 + nodes, hidden_size]."""
    kept = rows[[0, *(1 + node for node in decision.accepted)]].cpu().contiguous()
    data = kept.view(torch.uint8).numpy().tobytes()
    return Features(str(kept.dtype).removeprefix("torch."), kept.shape[1], len(kept), data)


def _segment(job: Job, num_rows: int) -> Segment:
    """The next ``num_rows`` committed ids that are not cached, and the tree if the last of these ids is the root."""
    cache: SequenceCache = job.memory.cache
    num_context = len(cache)
    root = num_rows - 1
    ends_with_root = num_context + num_rows == len(job.ids)
    tree = job.tree if ends_with_root else EMPTY_TREE
    cache.take(num_rows + len(tree))
    return Segment(
        token_ids=[*job.ids[num_context : num_context + num_rows], *tree.token_ids],
        parents=[*range(-1, root), *(root + 1 + parent for parent in tree.parents)],
        num_context=num_context,
        block_table=cache.block_table,
        logit_rows=range(root, num_rows + len(tree)) if ends_with_root else (),
    )
