"""A target that verifies chains alone is sent nothing else, and no more of one than it verifies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.core.tree import TokenTree
from target_service.verifier import Job
from target_service.vllm_decisions import TargetSampler
from target_service.vllm_verifier import VllmVerifier
from tests.cluster import cluster
from tests.models.fake_vllm import FakeVllm
from tests.models.table_runner import TableRunner

PROMPTS = [[1, 2, 3], [4, 5] * 6]


class Watched(VllmVerifier):
    """Remembers the trees that it is to verify."""

    def __init__(self) -> None:
        table = TableRunner(seed=1)
        super().__init__(FakeVllm(table, TargetSampler(torch.device("cpu"))), table.info)  # type: ignore[arg-type]
        self.trees: list[TokenTree] = []

    def verify(self, jobs: Sequence[Job]) -> Any:
        self.trees += [job.tree for job in jobs]
        return super().verify(jobs)


async def texts(verifier: Watched, num_draft_tokens: int | None, **settings: Any) -> list[list[int]]:
    drafter = LanguageModelDrafter(TableRunner(seed=1, blend=(2, 0.2)))
    async with cluster([verifier], [drafter], num_draft_tokens=num_draft_tokens, **settings) as running:
        asked = [{"token_ids": {"token_ids": ids}, "max_tokens": 120, "seed": 3} for ids in PROMPTS]
        samples = [sample for fields in asked for sample in await running.client.generate(**fields)]
        await running.settled()
    return [sample.token_ids for sample in samples]


@pytest.mark.slow
@pytest.mark.parametrize("num_ahead_tokens", [0, 40])
@pytest.mark.parametrize("num_draft_tokens", [2, 12, None])
async def test_a_target_that_verifies_chains_is_sent_no_row_that_it_leaves_out(
    num_draft_tokens: int | None, num_ahead_tokens: int
) -> None:
    alone, verifier = Watched(), Watched()
    expected = await texts(alone, 0)
    settings = {"num_siblings": 2, "num_ahead_tokens": num_ahead_tokens}
    assert await texts(verifier, num_draft_tokens, **settings) == expected
    assert num_draft_tokens is None or any(len(tree) > 1 for tree in verifier.trees)
    assert all(tree.is_chain for tree in verifier.trees)
    assert max(map(len, verifier.trees)) <= verifier.info.max_chain == FakeVllm.max_chain
