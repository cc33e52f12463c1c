"""A sampler for vLLM's workers that raises for texts with a bias, as one with a fault that only some texts meet."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.vllm.passes import Sampled, WorkerJob
from target_service.vllm_decisions import TargetSampler


class RaisingSampler(TargetSampler):
    def sample(self, jobs: Sequence[WorkerJob]) -> list[Sampled]:
        if any(job.payload.sampling.logit_bias for job in jobs):
            raise RuntimeError("planted")
        return super().sample(jobs)
