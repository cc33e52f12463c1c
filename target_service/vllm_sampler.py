"""Verification in vLLM's workers: chains, by the same decision as in our own engine.

Knows jobs of a pass; does not know vLLM's batches (specdec.vllm.engine).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from specdec.backends.choice import choose
from specdec.core.tree import TokenTree
from specdec.passes.outputs import PassOutputs
from specdec.sampling.state import SamplingState
from specdec.vllm.engine import WorkerJob
from target_service.decision import decide
from target_service.verifier import Job


@dataclass(slots=True)
class _Memory:
    sampling: SamplingState


class TargetSampler:
    """See specdec.vllm.engine.WorkerSampler. The payload of a sequence is its SequenceSpec without ids; the extra of a
    chain is its draft_probs (specdec.core.tree.TokenTree)."""

    def __init__(self, device: torch.device) -> None:
        self._backend = choose("torch", device)
        self._memories: dict[str, _Memory] = {}

    def forget(self, key: str) -> None:
        self._memories.pop(key, None)

    def sample(self, jobs: Sequence[WorkerJob]) -> list[list[int]]:
        if not jobs:
            return []
        sound = torch.isfinite(torch.cat([job.logits for job in jobs])).all(dim=-1).tolist()
        tokens: list[list[int]] = [[] for _ in jobs]
        start, places = 0, []
        for place, job in enumerate(jobs):
            end = start + len(job.logits)
            if all(sound[start:end]):
                places.append(place)
            start = end
        chosen = [self._job(jobs[place]) for place in places]
        outputs = [PassOutputs(jobs[place].logits, torch.empty(0), torch.ones(1)).as_one() for place in places]
        for place, job, decision in zip(places, chosen, decide(chosen, outputs, self._backend), strict=True):
            tokens[place] = [*job.tree.token_ids[: len(decision.accepted)], decision.next_token]
        return tokens

    def _job(self, job: WorkerJob) -> Job:
        memory = self._memories.get(job.key)
        if memory is None:
            memory = self._memories[job.key] = _Memory(SamplingState(job.payload))
        # Only the number of ids counts where nothing depends on the text.
        ids: Sequence[int] = job.ids() if memory.sampling.transforms.active else range(job.num_ids)
        memory.sampling.take_in(ids)
        return Job(memory, ids, TokenTree.chain(job.chain, job.extra or ()))
