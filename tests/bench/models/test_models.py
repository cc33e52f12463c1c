"""The models of benchmarks: how often their drafts guess right, and that the damped pair is two checkpoints."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from bench.harness.windows import Windows
from bench.models.damped_pair import damped_pair
from bench.peers import TransformersPair
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.runner.checkpoint import Checkpoint
from testing.table_model import Table
from tests.bench.conftest import SMALL


def test_both_are_checkpoints_of_one_vocabulary_that_are_made_once(small_pair):
    weights = small_pair.target / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert damped_pair(small_pair.target.parents[1], SMALL) == small_pair
    assert weights.stat().st_mtime_ns == made
    target, draft = (Checkpoint.find(str(d), "float32").info for d in (small_pair.target, small_pair.draft))
    assert target.vocab_size == draft.vocab_size == SMALL.vocab_size
    assert target.tokenizer_fingerprint == draft.tokenizer_fingerprint != ""
    assert target.context_length == SMALL.context_length
    assert target.eos_token_ids == ()


def test_the_draft_is_the_lower_part_of_the_target(small_pair):
    target, draft = (AutoModelForCausalLM.from_pretrained(d) for d in (small_pair.target, small_pair.draft))
    assert target.dtype == draft.dtype == torch.bfloat16
    assert (len(target.model.layers), len(draft.model.layers)) == (SMALL.layers, SMALL.draft_layers)
    weights = target.state_dict()
    for name, weight in draft.state_dict().items():
        assert torch.equal(weight, weights[name]), name
    lower, upper = (target.model.layers[index].mlp.down_proj.weight.detach().std() for index in (0, SMALL.layers - 1))
    assert abs(float(upper / lower) / SMALL.damping - 1) < 0.1


def test_the_draft_guesses_about_four_in_five(small_pair):
    models = TransformersPair(str(small_pair.target), str(small_pair.draft), "float32")
    prompts = Windows(SMALL.vocab_size).take(8, 32)
    assert 0.7 <= models.acceptance(prompts, models.generate(prompts, 32)) <= 0.9


SPEC = SequenceSpec((1, 2, 3), 3, SamplingParams(0.0), 0)
POSITIONS = range(3, 4003)


@pytest.mark.parametrize(("acceptance", "runner_up"), [(0.8, 0.33), (0.5, 0.5), (0.0, 1.0), (0.0, 0.0)])
def test_guesses_are_right_as_often_as_they_are_told_to_be(acceptance, runner_up):
    table = Table(acceptance=acceptance, runner_up=runner_up)
    ranks = []
    for position in POSITIONS:
        tail = (position, 7 * position, 11)
        guesses = table.guesses(SPEC, tail, position, 6)
        assert len({*guesses}) == 6
        assert guesses[0] == table.guess(SPEC, tail, position)
        token = table.next_token(SPEC, tail, position)
        ranks.append(guesses.index(token) if token in guesses else None)
    assert ranks.count(0) / len(ranks) == pytest.approx(acceptance, abs=0.03)
    assert ranks.count(1) / len(ranks) == pytest.approx((1 - acceptance) * runner_up, abs=0.03)
    assert {*ranks} <= {0, 1, None}, "no third guess is right"
