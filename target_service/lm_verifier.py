"""A language model as a verifier: feeds trees, samples, verifies, keeps the KV of what was accepted.

Knows tensors; refuses to know rounds and streams.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.errors import Preempted, SpecdecError
from specdec.kv_cache import PoolFullError, SequenceCache
from specdec.model_runner import ModelRunner, Segment
from specdec.noise import Domain, exponentials, uniforms
from specdec.noise_cache import CoupledNoise
from specdec.rounds import Timings
from specdec.sampling import dense_from_sparse, probabilities, race, sample_coupled
from specdec.sequence import Method, SequenceSpec
from specdec.tree import TokenTree
from specdec.verification import descend, verify_block, verify_token
from target_service.engine import Decision, Job

PREFILL_CHUNK = 512
"""Committed tokens fed per pass and sequence at most, so that a long prompt does not keep the others waiting."""


@dataclass(slots=True)
class _Memory:
    spec: SequenceSpec
    cache: SequenceCache
    noise: CoupledNoise


class LmVerifier:
    """See target_service.engine.Verifier. ``runner`` may be anything with its info, new_cache and forward."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.info = runner.info

    def open(self, spec: SequenceSpec) -> _Memory:
        noise = CoupledNoise(spec.seed, self.info.vocab_size, self._runner.device)
        return _Memory(spec, self._runner.new_cache(), noise)

    def close(self, memory: _Memory) -> None:
        memory.cache.release()

    def cache_use(self) -> tuple[int, int]:
        return self._runner.pool.num_used, self._runner.pool.num_slots

    def verify(self, jobs: Sequence[Job]) -> tuple[list[Decision | SpecdecError | None], Timings]:
        outcome: list[Decision | SpecdecError | None] = [None] * len(jobs)
        fed: dict[int, Segment] = {}
        for index, job in enumerate(jobs):
            try:
                fed[index] = _segment(job)
            except PoolFullError as error:
                outcome[index] = Preempted(str(error))
        started = time.perf_counter()
        logits = self._runner.forward(list(fed.values())) if fed else []
        passed = time.perf_counter()
        for (index, segment), job_logits in zip(fed.items(), logits, strict=True):
            job = jobs[index]
            if not segment.logit_rows:  # a prefill that goes on in the next pass
                job.memory.cache.keep(range(len(segment.token_ids)))
                continue
            decision = _decide(job, job_logits)
            first_node = len(segment.token_ids) - len(job.tree)
            kept = [*range(first_node), *(first_node + node for node in decision.accepted)]
            job.memory.cache.keep(kept)
            outcome[index] = decision
        timings = Timings(
            pass_us=int((passed - started) * 1e6),
            sample_us=int((time.perf_counter() - passed) * 1e6),
            rows=sum(len(segment.token_ids) for segment in fed.values()),
            sequences=len(fed),
        )
        return outcome, timings


def _segment(job: Job) -> Segment:
    """What is committed but not cached (ending with the root), then the tree; of a long prefill, the next chunk."""
    cache: SequenceCache = job.memory.cache
    behind = job.ids[len(cache) :]
    if len(behind) > PREFILL_CHUNK:
        behind = behind[:PREFILL_CHUNK]
        slots = cache.take(len(behind))
        return Segment(behind, range(-1, len(behind) - 1), list(cache.slots), slots, ())
    root = len(behind) - 1
    return Segment(
        token_ids=[*behind, *job.tree.token_ids],
        parents=[*range(-1, root), *(root + 1 + parent for parent in job.tree.parents)],
        context_slots=list(cache.slots),
        row_slots=cache.take(len(behind) + len(job.tree)),
        logit_rows=range(root, len(behind) + len(job.tree)),
    )


def _decide(job: Job, logits: Tensor) -> Decision:
    """Verify ``job.tree`` by logits [1 + nodes, vocab]: the root's row, then each node's."""
    spec: SequenceSpec = job.memory.spec
    base = len(job.ids)
    if spec.keyed_by_token:
        noise = None
        if not spec.sampling.greedy:
            noise = job.memory.noise.rows([base, *(base + depth + 1 for depth in job.tree.depths)], base)
        target_tokens = sample_coupled(logits, spec.sampling, noise).tolist()
        accepted, next_token = descend(job.tree.token_ids, job.tree.parents, target_tokens)
        return Decision(tuple(accepted), next_token, tuple(target_tokens))
    verify = verify_block if spec.method is Method.BLOCK else verify_token
    target_probs = probabilities(logits, spec.sampling)  # [1 + nodes, vocab]
    num_accepted, distribution = verify(
        target_probs,
        _draft_probs(job.tree, target_probs),
        torch.tensor(job.tree.token_ids, dtype=torch.int64, device=logits.device),
        uniforms(spec.seed, range(base, base + len(job.tree)), base, Domain.ACCEPT),
    )
    position = base + num_accepted
    noise = exponentials(spec.seed, [position], base, Domain.CORRECTION, logits.shape[-1], logits.device)
    next_token = int(race(distribution.log()[None], noise))
    return Decision(tuple(range(num_accepted)), next_token)


def _draft_probs(tree: TokenTree, like: Tensor) -> Tensor:  # [nodes, vocab] float64
    """What each node was sampled from; one-hot where the draft was certain."""
    rows = like.new_zeros(len(tree), like.shape[-1])
    for node, token in enumerate(tree.token_ids):
        sparse = tree.draft_probs[node] if tree.draft_probs else None
        if sparse is None:
            rows[node, token] = 1.0
        else:
            ids = torch.tensor(sparse.token_ids, dtype=torch.int64, device=like.device)
            weights = torch.tensor(sparse.weights, dtype=torch.float64, device=like.device)
            rows[node] = dense_from_sparse(ids, weights, like.shape[-1])
    return rows
