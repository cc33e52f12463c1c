"""Verification of all jobs of a pass: which nodes are accepted, and the token after them.

Knows sampling and verification; does not know the model and its cache. Jobs are grouped by verification method and each
group is one batch. All tokens drawn for a pass leave the device as one array. Nothing is drawn for jobs that want the
likeliest tokens if the pass has returned these.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from specdec.backends.base import Backend
from specdec.core.device import indices
from specdec.core.errors import SpecdecError
from specdec.core.limits import chunked
from specdec.core.noise import Domain, Key, exponentials, uniforms
from specdec.core.sequence import Draw, Method
from specdec.core.tree import EMPTY_TREE, SparseDistribution, TokenTree
from specdec.passes.outputs import RowOutputs
from specdec.sampling.distributions import dense_from_sparse, probabilities, race
from specdec.sampling.draft_draws import drawn_as_said
from specdec.sampling.state import NO_TOKEN, SamplingState, or_no_token, rows_of
from specdec.speculation.verification import descend, verify_block, verify_token
from target_service.verifier import Decision, Job


def decide(jobs: Sequence[Job], outputs: Sequence[RowOutputs], backend: Backend) -> list[Decision | SpecdecError]:
    """Verify each job's tree against the outputs of the pass for its root and each of its nodes. An error ends that
    sequence only: after its text every token is forbidden.

    ``job.memory.sampling`` is the sequence's SamplingState, which has taken in the job's ids. A decision does not
    depend on the other jobs.
    """
    given, jobs = jobs, _without_lies(jobs)
    target_tokens: dict[int, Sequence[int]] = {}  # by keyed job
    for index, job in enumerate(jobs):
        if _state(job).takes_most_likely and (most_likely := outputs[index].most_likely) is not None:
            target_tokens[index] = most_likely
    others = [index for index in range(len(jobs)) if index not in target_tokens]
    keyed = [index for index in others if _state(jobs[index]).spec.keyed_by_token]
    chained = [index for index in others if not _state(jobs[index]).spec.keyed_by_token]
    logits = {index: outputs[index].logits[: 1 + len(jobs[index].tree)] for index in others}
    drawn: list[Tensor] = []
    for part in _chunks(keyed, logits, backend.logits_per_call):
        drawn.append(_target_tokens([jobs[i] for i in part], [logits[i] for i in part], backend))
    num_accepted: dict[int, int] = {}
    for method in (Method.TOKEN, Method.BLOCK):
        alike = [index for index in chained if _state(jobs[index]).spec.method is method]
        for part in _chunks(alike, logits, backend.logits_per_call):
            accepted, after = _verify_chains(method, [jobs[i] for i in part], [logits[i] for i in part])
            num_accepted.update(zip(part, accepted, strict=True))
            drawn.append(after)
    tokens: list[int] = torch.cat(drawn).tolist() if drawn else []

    start = 0
    for index in keyed:
        end = start + 1 + len(jobs[index].tree)
        target_tokens[index], start = tokens[start:end], end
    decisions: dict[int, Decision] = {}
    for index, of_job in target_tokens.items():
        nodes, next_token = descend(jobs[index].tree.token_ids, jobs[index].tree.parents, of_job)
        decisions[index] = Decision(tuple(nodes), next_token, tuple(of_job))
    for (index, number), next_token in zip(num_accepted.items(), tokens[start:], strict=True):
        decisions[index] = Decision(tuple(range(number)), next_token, refused=jobs[index] is not given[index])
    return [
        _state(job).no_token if decisions[index].next_token == NO_TOKEN else decisions[index]
        for index, job in enumerate(jobs)
    ]


def _without_lies(jobs: Sequence[Job]) -> list[Job]:
    """The jobs. A chain with a token that was not drawn as it says is dropped."""
    trees = [EMPTY_TREE if _state(job).spec.keyed_by_token else job.tree for job in jobs]
    roots = [Key(_state(job).spec.seed, len(job.ids), len(job.ids)) for job in jobs]
    honest = drawn_as_said(trees, roots)
    return [job if ok else dataclasses.replace(job, tree=EMPTY_TREE) for job, ok in zip(jobs, honest, strict=True)]


def _chunks(indices: Sequence[int], logits: Mapping[int, Tensor], most: int) -> Iterator[list[int]]:
    """Whole jobs in chunks of at most ``most`` logits: float64 takes several times the memory of the model's logits."""
    for part in chunked([logits[index].numel() for index in indices], most):
        yield [indices[place] for place in part]


def _target_tokens(jobs: Sequence[Job], logits: Sequence[Tensor], backend: Backend) -> Tensor:  # [rows] int64
    """Greedy and coupled: the tokens that the target draws at every job's root and nodes."""
    draws: list[Draw] = []
    for job in jobs:
        state, base = _state(job), len(job.ids)
        draws += [state.draw(base), *(state.draw(base + depth + 1) for depth in job.tree.depths)]
    places = [(_state(job), job.tree) for job in jobs]
    rows = rows_of(logits, places)
    return or_no_token(backend.draw(rows, draws), rows, places)


def _verify_chains(method: Method, jobs: Sequence[Job], logits: Sequence[Tensor]) -> tuple[list[int], Tensor]:
    """Token or block: how many nodes of each job are accepted, and the token after them, [jobs] int64."""
    num_nodes = [len(job.tree) for job in jobs]
    params = [_state(job).spec.sampling for job in jobs for _ in range(1 + len(job.tree))]
    places = [(_state(job), job.tree) for job in jobs]
    rows = rows_of(logits, places)
    target_probs = probabilities(rows, params).nan_to_num_(0.0)  # [rows, vocab]; 0: every token is forbidden
    draft_probs = _draft_probs([job.tree for job in jobs], target_probs)
    token_ids = [token for job in jobs for token in job.tree.token_ids]
    keys = [Key(_state(job).spec.seed, len(job.ids) + i, len(job.ids)) for job in jobs for i in range(len(job.tree))]
    verify = verify_block if method is Method.BLOCK else verify_token
    accepted, following = verify(target_probs, draft_probs, token_ids, uniforms(keys, Domain.ACCEPT), num_nodes)
    after = [
        Key(_state(job).spec.seed, len(job.ids) + num, len(job.ids)) for job, num in zip(jobs, accepted, strict=True)
    ]
    noise = exponentials(after, Domain.CORRECTION, target_probs.shape[-1], target_probs.device)
    starts = itertools.accumulate(num_nodes, lambda start, num: start + 1 + num, initial=0)
    last = indices([start + num for start, num in zip(starts, accepted, strict=False)], rows.device)
    return accepted, or_no_token(race(following.log(), noise), rows[last], places)


def _draft_probs(trees: Sequence[TokenTree], like: Tensor) -> Tensor:  # [nodes of all trees, vocab] float64
    """The distribution that each node was sampled from; one-hot if the draft was certain."""
    sparse = [
        (tree.draft_probs[node] if tree.draft_probs else None) or SparseDistribution((token,), (1.0,))
        for tree in trees
        for node, token in enumerate(tree.token_ids)
    ]
    return dense_from_sparse(sparse, like.shape[-1], like.device)


def _state(job: Job) -> SamplingState:
    state: SamplingState = job.memory.sampling
    return state
