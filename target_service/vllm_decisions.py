"""Verification in vLLM's workers: chains, by the same decision as in our own engine.

Knows jobs of a pass; does not know vLLM's batches (specdec.vllm.engine).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.backends.choice import choose
from specdec.core.errors import SpecdecError
from specdec.core.tree import TokenTree
from specdec.passes.outputs import PassOutputs
from specdec.sampling.grammar import Grammars
from specdec.vllm.passes import Sampled, WorkerJob, WorkerStates
from target_service.decision import Case, decide


class TargetSampler:
    """See specdec.vllm.passes.WorkerSampler. The payload of a sequence is its SequenceSpec without ids; the extra of a
    pass is its chain's draft_probs (specdec.core.tree.TokenTree), or None. What goes back is Decision.refused."""

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
                sampled[index] = Sampled((*accepted, decision.next_token), decision.refused)
        return sampled

    def _case(self, job: WorkerJob) -> Case:
        sampling = self._states.of(job).sampling
        # Only the number of ids counts where nothing depends on the text.
        ids: Sequence[int] = job.ids(0) if sampling.transforms.active else range(job.num_ids)
        if error := sampling.take_in(ids):
            raise error
        draft_probs = (job.extra or ())[: len(job.chain)]  # vLLM may have cut the chain
        return Case(sampling, ids, TokenTree.chain(job.chain, draft_probs))
