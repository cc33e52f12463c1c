"""Candidates in vLLM's workers, by the same draws as with engine torch."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import torch

from draft_service.drafter import Candidates, DraftSequence
from draft_service.drafters.proposal import draw, rank
from specdec.backends.choice import choose
from specdec.core.tree import TokenTree
from specdec.passes.outputs import PassOutputs, RowOutputs
from specdec.sampling.grammar import Grammars
from specdec.vllm.passes import Sampled, WorkerJob, WorkerState, WorkerStates


class Request(NamedTuple):
    """Ids before ``base`` are committed, the others are the draft's. ``num_candidates`` are wanted after the last."""

    base: int
    num_candidates: int


class DraftSampler:
    """See specdec.vllm.passes.WorkerSampler. The payload of a sequence is its SequenceSpec without ids, the extra of a
    pass its Request. All of the chain is accepted, because it is the text; what comes after it are Candidates."""

    def __init__(self, device: torch.device, grammars: Grammars | None = None) -> None:
        self._backend = choose("torch", device)
        self._states = WorkerStates(grammars)
        self.forget = self._states.forget

    def sample(self, jobs: Sequence[WorkerJob]) -> list[Sampled]:
        sequences = {index: self._sequence(job) for index, job in enumerate(jobs) if job.sound}
        ranking = [index for index, sequence in sequences.items() if sequence.spec.keyed_by_token]
        drawing = [index for index in sequences if index not in ranking]
        inputs = [(sequences[index], sequences[index].tree, _last_row(jobs[index])) for index in ranking]
        candidates = {index: first for index, [first] in zip(ranking, rank(inputs, self._backend), strict=True)}
        logits = [jobs[index].logits[-1:] for index in drawing]
        drawn = draw([sequences[index] for index in drawing], logits, self._backend.logits_per_call)
        candidates.update(zip(drawing, drawn, strict=True))
        return [_sampled(job, candidates.get(index, Candidates())) for index, job in enumerate(jobs)]

    def _sequence(self, job: WorkerJob) -> DraftSequence[WorkerState]:
        state = self._states.of(job)
        base, num_candidates = job.extra
        # Only the number of ids counts where nothing depends on the text.
        committed = array("I", bytes(4 * base))
        if state.sampling.transforms.active:
            committed = array("I", [*job.ids(0), *job.chain][:base])
            if error := state.sampling.take_in(committed):
                raise error
        tree = TokenTree.chain([*job.ids(base), *job.chain[max(0, base - job.num_ids) :]])
        return DraftSequence(job.payload, committed, tree, state=state, num_candidates=num_candidates)


def _last_row(job: WorkerJob) -> RowOutputs:
    return PassOutputs(job.logits[-1:], torch.empty(0), torch.ones(1)).as_one()


def _sampled(job: WorkerJob, candidates: Candidates) -> Sampled:
    return Sampled((*job.chain, candidates.token_ids[0]), candidates) if candidates.token_ids else Sampled()
