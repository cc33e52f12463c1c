"""Verification in vLLM's workers: chains, by the same decision as in our own engine.

Knows jobs of a pass; does not know vLLM's batches (specdec.vllm.engine).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.backends.choice import choose
from specdec.core.device import indices
from specdec.core.errors import SpecdecError
from specdec.core.rounds import Logprobs
from specdec.core.tree import SparseDistribution, TokenTree
from specdec.passes.outputs import PassOutputs
from specdec.sampling.grammar import Grammars
from specdec.sampling.logprobs import logprobs_of
from specdec.vllm.passes import Place, Sampled, WorkerJob, WorkerStates
from target_service.decision import Case, decide


@dataclass(frozen=True, slots=True)
class ChainRequest:
    """Of a sequence in a pass. ``draft_probs``: of its chain's tokens (specdec.core.tree.TokenTree). ``num_logprobs``:
    see specdec.core.rounds.TargetOpen."""

    draft_probs: tuple[SparseDistribution | None, ...] = ()
    num_logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class ChainReport:
    """What a Decision has beside its tokens."""

    refused: bool = False
    logprobs: Logprobs | None = None


class TargetSampler:
    """See specdec.vllm.passes.WorkerSampler. The payload of a sequence is its SequenceSpec without ids; the extra of a
    pass is a ChainRequest. What goes back is a ChainReport."""

    def __init__(self, device: torch.device, grammars: Grammars | None = None) -> None:
        self._backend = choose("torch", device)
        self._states = WorkerStates(grammars)
        self.forget = self._states.forget

    def sample(self, jobs: Sequence[WorkerJob]) -> list[Sampled]:
        cases = {index: self._case(job) for index, job in enumerate(jobs) if job.sound}
        outputs = [PassOutputs(jobs[index].logits, torch.empty(0), torch.ones(1)).as_one() for index in cases]
        decisions = decide(list(cases.values()), outputs, self._backend)
        sampled = [Sampled() for _ in jobs]
        for (index, case), decision in zip(cases.items(), decisions, strict=True):
            if isinstance(decision, SpecdecError):
                sampled[index] = Sampled(extra=decision)
            else:
                accepted = case.tree.token_ids[: len(decision.accepted)]
                sampled[index] = Sampled((*accepted, decision.next_token), ChainReport(decision.refused))
        return self._with_logprobs(jobs, sampled)

    def _with_logprobs(self, jobs: Sequence[WorkerJob], sampled: list[Sampled]) -> list[Sampled]:
        num_top = {
            index: job.extra.num_logprobs
            for index, (job, result) in enumerate(zip(jobs, sampled, strict=True))
            if result.tokens and job.extra.num_logprobs is not None
        }
        if not num_top:
            return sampled
        tokens = [sampled[index].tokens for index in num_top]
        logits = [jobs[index].logits[: len(sampled[index].tokens)] for index in num_top]
        logprobs = logprobs_of(logits, tokens, list(num_top.values()), logits_per_call=self._backend.logits_per_call)
        for index, found in zip(num_top, logprobs, strict=True):
            report = dataclasses.replace(sampled[index].extra, logprobs=found)
            sampled[index] = dataclasses.replace(sampled[index], extra=report)
        return sampled

    def draft(self, logits: Tensor, places: Sequence[Place | None]) -> Tensor:
        """See specdec.vllm.passes.DraftingSampler. With the noise that the target will use there: equal noise makes
        equal tokens likely."""
        draws = {
            row: state.sampling.draw(place.position)
            for row, place in enumerate(places)
            if place is not None and (state := self._states.get(place.key))
        }
        tokens = logits.argmax(-1)
        if draws:
            rows = indices(list(draws), logits.device)
            tokens[rows] = self._backend.draw(logits[rows], list(draws.values()))
        return tokens

    def _case(self, job: WorkerJob) -> Case:
        sampling = self._states.of(job).sampling
        # Only the number of ids counts where nothing depends on the text.
        ids: Sequence[int] = job.ids(0) if sampling.transforms.active else range(job.num_ids)
        if error := sampling.take_in(ids):
            raise error
        draft_probs = job.extra.draft_probs[: len(job.chain)]  # vLLM may have cut the chain
        return Case(sampling, ids, TokenTree.chain(job.chain, draft_probs))
