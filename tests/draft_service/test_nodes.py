"""Nodes beside and of a chain: runners-up, which change nothing of it, and the confidence bucket of each node."""

from __future__ import annotations

import math

import pytest
import torch

from specdec.core.rounds import Budget
from specdec.core.sequence import SamplingParams
from specdec.core.tree import MAX_CONFIDENCE, TokenTree
from specdec.sampling.confidence import confidence_of
from tests.draft_service.engines import SAMPLINGS, grown, paths
from tests.models.table_runner import TableRunner

GREEDY = SamplingParams(0.0)
AHEAD = Budget(2, 6, 20)


def chain(sampling: SamplingParams, num_nodes: int, max_siblings: int = 0) -> TokenTree:
    return grown(sampling, Budget(num_nodes, num_nodes, max_siblings=max_siblings))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("max_siblings", [2, 8])
def test_every_node_of_the_chain_gets_its_runners_up_and_stays_as_it_is(
    sampling: SamplingParams, max_siblings: int
) -> None:
    tree = chain(sampling, 4, max_siblings)
    assert tree.problem(8) is None
    assert tree.trunk() == chain(sampling, 4)
    for node in range(-1, 3):
        assert tree.parents.count(node) == 1 + min(max_siblings, 7)  # of 8 tokens
    assert all(parent < 3 for parent in tree.parents), "nothing hangs from a runner-up or the end"


def test_the_first_runner_up_is_what_would_be_proposed_without_the_first() -> None:
    """Greedy: the next best token; the chain's own is taken away by a bias."""
    best, runner_up = chain(GREEDY, 1, 1).token_ids
    assert chain(SamplingParams(0.0, logit_bias=((best, -100.0),)), 1).token_ids == (runner_up,)


def test_the_confidence_of_a_node_is_the_margin_of_the_best_token_in_octaves() -> None:
    runner = TableRunner(seed=3)
    tree = grown(GREEDY, AHEAD, runner)
    assert len(set(tree.confidence)) > 1
    for path, confidence in zip(paths(tree), tree.confidence, strict=True):
        best, second = runner.logits_after([1, 2, 3, *path[:-1]]).double().topk(2).values.tolist()
        assert confidence == min(MAX_CONFIDENCE, 1 + max(0, math.floor(math.log2(best - second) + 8)))


def test_of_the_only_token_there_is_the_confidence_is_the_highest() -> None:
    assert confidence_of(torch.zeros(3, 1)).tolist() == [MAX_CONFIDENCE] * 3
    unlike = torch.tensor([[1.0, -torch.inf], [-torch.inf, -torch.inf], [0.0, 0.0], [95.0, 5.0], [5.01, 5.0]])
    assert confidence_of(unlike).tolist() == [MAX_CONFIDENCE, 1, 1, 15, 2]


def test_a_chain_that_does_not_grow_ahead_has_no_confidence() -> None:
    assert chain(GREEDY, 4).confidence == ()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_the_confidence_is_higher_the_target_agrees_more_often(temperature: float) -> None:
    agreed = {True: [0, 0], False: [0, 0]}
    for seed in range(60):
        runner, near = TableRunner(seed=seed), TableRunner(seed=seed)
        near.table = near.table + 0.5 * torch.randn(8, generator=torch.Generator().manual_seed(seed))
        tree = grown(SamplingParams(temperature), Budget(1, 2, 4), runner)
        right = grown(SamplingParams(temperature), Budget(1, 1), near).token_ids[0] == tree.token_ids[0]
        count = agreed[tree.confidence[0] >= 9]
        count[0], count[1] = count[0] + right, count[1] + 1
    assert agreed[True][0] / agreed[True][1] > agreed[False][0] / agreed[False][1] + 0.1
