"""The damped pair: a checkpoint like any other, whose draft guesses about four tokens in five."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM

from bench.models.damped_pair import damped_pair
from bench.peers.contender import Settings
from bench.peers.prompts import PromptSource
from bench.peers.transformers_peers import TransformersPair
from specdec.runner.checkpoint import Checkpoint
from tests.bench.conftest import SMALL

ONE_THREAD = Settings((1,))


def test_both_are_checkpoints_of_one_vocabulary(small_pair):
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


async def test_the_draft_guesses_about_four_in_five(small_pair):
    models = TransformersPair(small_pair, "float32")
    prompts = PromptSource(SMALL.vocab_size).take(8, 32)
    [contender, _] = models.contenders(1)
    outputs = [(await contender.run(ONE_THREAD, [prompt], 32)).outputs[0] for prompt in prompts]
    assert 0.7 <= models.acceptance(prompts, outputs) <= 0.9


def test_it_is_made_once(small_pair):
    weights = small_pair.target / "model.safetensors"
    made = weights.stat().st_mtime_ns
    assert damped_pair(small_pair.target.parents[1], SMALL) == small_pair
    assert weights.stat().st_mtime_ns == made
