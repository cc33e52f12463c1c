"""Runners-up beside a chain: what the draft would have said next, and nothing of the chain changes for them."""

from __future__ import annotations

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.errors import InvalidArgument
from specdec.core.rounds import Advance, Budget, Growth, GrowthEnd
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.server.step_loop import Key
from tests.models.table_runner import TableRunner

A = Key(1, 1)
SAMPLINGS = [
    SamplingParams(0.0),
    SamplingParams(0.8),
    SamplingParams(1.0, top_k=3),
    SamplingParams(0.7, presence_penalty=1.5, repetition_penalty=1.3),
]


def grown(
    sampling: SamplingParams, max_siblings: int, max_nodes: int = 4, ids: tuple[int, ...] = (1, 2, 3)
) -> TokenTree:
    """What one advance gives."""
    engine = DraftEngine(LanguageModelDrafter(TableRunner(seed=3)))
    engine.open(A, DraftOpen(SequenceSpec(ids, len(ids), sampling, 7), Budget()))
    while not engine.idle:
        engine.step()
    engine.submit(A, Advance(1, len(ids), (), EMPTY_TREE, Budget(max_nodes, max_nodes, max_siblings=max_siblings)))
    growths: list[Growth] = []
    while not engine.idle:
        growths += [growth for _, growth in engine.step()]
    [growth] = growths
    assert growth.end is GrowthEnd.BUDGET
    return growth.tree


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("max_siblings", [1, 2, 8])
def test_every_node_of_the_chain_gets_its_runners_up_and_stays_as_it_is(
    sampling: SamplingParams, max_siblings: int
) -> None:
    tree = grown(sampling, max_siblings)
    assert tree.problem(8) is None
    assert tree.trunk() == grown(sampling, 0)
    num_siblings = min(max_siblings, 8 - 1)  # of 8 tokens
    for node in range(-1, 3):
        assert tree.parents.count(node) == 1 + num_siblings
    assert all(parent < 3 for parent in tree.parents), "nothing hangs from a runner-up or the end"


def test_the_first_runner_up_is_what_would_have_been_said_without_the_first() -> None:
    """Greedy: the next best token; the chain's own is taken away by a bias."""
    best, runner_up = grown(SamplingParams(0.0), 1, max_nodes=1).token_ids
    assert grown(SamplingParams(0.0, logit_bias=((best, -100.0),)), 0, max_nodes=1).token_ids == (runner_up,)


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
def test_chains_with_distributions_have_none(method: Method) -> None:
    engine = DraftEngine(LanguageModelDrafter(TableRunner(seed=3)))
    engine.open(A, DraftOpen(SequenceSpec((1, 2, 3), 3, SamplingParams(1.0), 7, method), Budget()))
    with pytest.raises(InvalidArgument) as caught:
        engine.submit(A, Advance(1, 3, (), EMPTY_TREE, Budget(4, 4, max_siblings=1)))
    assert caught.value.violations[0][0] == "budget.max_siblings"
