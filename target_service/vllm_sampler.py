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
from specdec.vllm.passes import Memories, Sampled, WorkerJob
from target_service.decision import decide
from target_service.verifier import Job


class TargetSampler:
    """See specdec.vllm.passes.WorkerSampler. The payload of a sequence is its SequenceSpec without ids; the extra of a
    pass is its chain's draft_probs (specdec.core.tree.TokenTree), or None. What goes back is Decision.refused."""

    def __init__(self, device: torch.device, grammars: Grammars | None = None) -> None:
        self._backend = choose("torch", device)
        self._memories = Memories(grammars)
        self.forget = self._memories.forget

    def sample(self, jobs: Sequence[WorkerJob]) -> list[Sampled]:
        sound = {place: self._job(jobs[place]) for place, job in enumerate(jobs) if job.sound}
        outputs = [PassOutputs(jobs[place].logits, torch.empty(0), torch.ones(1)).as_one() for place in sound]
        decisions = decide(list(sound.values()), outputs, self._backend)
        sampled = [Sampled() for _ in jobs]
        for (place, job), decision in zip(sound.items(), decisions, strict=True):
            if isinstance(decision, SpecdecError):
                sampled[place] = Sampled(extra=decision)
            else:
                accepted = job.tree.token_ids[: len(decision.accepted)]
                sampled[place] = Sampled((*accepted, decision.next_token), decision.refused)
        return sampled

    def _job(self, job: WorkerJob) -> Job:
        memory = self._memories.of(job)
        # Only the number of ids counts where nothing depends on the text.
        ids: Sequence[int] = job.ids(0) if memory.sampling.transforms.active else range(job.num_ids)
        if error := memory.sampling.take_in(ids):
            raise error
        drawn = (job.extra or ())[: len(job.chain)]  # vLLM may have cut the chain
        return Job(memory, ids, TokenTree.chain(job.chain, drawn))
