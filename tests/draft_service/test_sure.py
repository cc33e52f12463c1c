"""How sure a draft was of a guess is how far its best one was ahead of the second, in octaves; and it tells how often
the guess comes true."""

from __future__ import annotations

import math

import pytest
import torch

from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.drafters.proposal import confidence_of
from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.rounds import Advance, Budget
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import MAX_CONFIDENCE, ROOT, TokenTree
from tests.draft_service.growing_ahead import A, rest, together
from tests.models.table_runner import TableRunner


class Certain(TableRunner):
    """After an odd token it says 1 and nothing else, after an even one 2 or, nearly as likely, 3."""

    def logits_after(self, prefix):
        logits = torch.zeros(8)
        if prefix[-1] % 2:
            logits[1] = 90.0
        else:
            logits[2], logits[3] = 5.01, 5.0
        return logits


AHEAD = Budget(2, 6, 20)


def grown(runner: TableRunner, temperature: float = 0.0, budget: Budget = AHEAD) -> TokenTree:
    engine = DraftEngine(LanguageModelDrafter(runner))
    engine.open(A, DraftOpen(SequenceSpec((1, 2, 3), 3, SamplingParams(temperature), 7), Budget()))
    rest(engine)
    engine.submit(A, Advance(1, 3, (), budget=budget))
    return together(rest(engine))


def test_every_node_tells_how_sure_the_draft_was_there():
    runner = TableRunner(seed=3)
    tree = grown(runner)
    assert len(set(tree.confidence)) > 1
    for node, confidence in enumerate(tree.confidence):
        parent = tree.parents[node]
        above = [tree.token_ids[each] for each in tree.path(parent)] if parent != ROOT else []
        best, second = runner.logits_after([1, 2, 3, *above]).double().topk(2).values.tolist()
        assert confidence == min(MAX_CONFIDENCE, 1 + max(0, math.floor(math.log2(best - second) + 8)))


def test_what_can_hardly_be_said_is_as_sure_as_can_be_said():
    assert set(grown(Certain(seed=0)).confidence) == {15, 2}, "90 nats, and a hundredth of one"


def test_of_the_only_token_there_is_a_model_is_as_sure_as_can_be():
    assert confidence_of(torch.zeros(3, 1)).tolist() == [MAX_CONFIDENCE] * 3
    unlike = torch.tensor([[1.0, -torch.inf], [-torch.inf, -torch.inf], [0.0, 0.0]])
    assert confidence_of(unlike).tolist() == [MAX_CONFIDENCE, 1, 1]


def test_what_nobody_grows_ahead_tells_nothing():
    assert grown(TableRunner(seed=3), budget=Budget(4, 4)).confidence == ()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_the_draft_is_surer_the_target_agrees_more_often(temperature):
    agreed = {True: [0, 0], False: [0, 0]}
    for seed in range(60):
        runner = TableRunner(seed=seed)
        noise = torch.randn(8, generator=torch.Generator().manual_seed(seed))
        tree = grown(runner, temperature, Budget(1, 2, 4))
        near = TableRunner(seed=seed)
        near.logits_after = lambda prefix, of=runner, noise=noise: of.logits_after(prefix) + 0.5 * noise
        right = grown(near, temperature, Budget(1, 1)).token_ids[0] == tree.token_ids[0]
        count = agreed[tree.confidence[0] >= 9]
        count[0], count[1] = count[0] + right, count[1] + 1
    assert agreed[True][0] / agreed[True][1] > agreed[False][0] / agreed[False][1] + 0.1
