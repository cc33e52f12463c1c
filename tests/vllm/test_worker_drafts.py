"""What goes wrong while a draft model goes on ends what is drafted, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specdec.vllm import worker_drafts
from specdec.vllm.passes import Sampled, WorkerJob
from specdec.vllm.worker_drafts import FurtherDrafts


class Sampler:
    """Draws the likeliest token. It raises for token 3, and finds none in NaN, as the samplers of our services."""

    def sample(self, jobs: Sequence[WorkerJob]) -> list[Sampled]:
        return [self._sampled(job) for job in jobs]

    def _sampled(self, job: WorkerJob) -> Sampled:
        token = int(job.logits[-1].argmax())
        if not job.sound:
            return Sampled()
        if token == 3:
            raise RuntimeError("planted")
        return Sampled((*job.chain, token), f"after {job.key}")

    def forget(self, key: str) -> None:
        pass


@pytest.mark.parametrize("fault", ["NaN", "raises"])
def test_a_fault_of_one_text_leaves_the_others_what_was_drafted(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.zeros(3, 2, 5)  # of three steps of two texts
    rows[:, :, 1] = 1.0
    rows[1, 0, 3] = torch.nan if fault == "NaN" else 9.0  # the second step of the first text
    steps = iter(rows)
    monkeypatch.setattr(worker_drafts, "_Steps", lambda *_, **__: SimpleNamespace(logits_after=lambda _: next(steps)))
    runner: Any = SimpleNamespace(
        sample_tokens=lambda: SimpleNamespace(), input_batch=SimpleNamespace(req_ids=["a", "b"])
    )
    passed = {
        key: (WorkerJob(key, None, None, 2, lambda _: [7, 8], (), rows[0, :1], True), Sampled((1,))) for key in "ab"
    }
    further = FurtherDrafts(runner, Sampler(), passed, vocab_size=5)
    assert further.propose(SimpleNamespace(num_drafts=3), None, None) == [[], []]
    assert further._drafts == {"a": ["after a"], "b": ["after b", "after b"]}
