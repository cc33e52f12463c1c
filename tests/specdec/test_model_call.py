"""A model that is called straight gives the bits of its own code; others are called by that."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from specdec import model_runner
from specdec.decoder_layer import compute_decoder_layers
from specdec.model_call import OwnCode, Straight
from specdec.model_runner import ModelRunner
from tests.specdec.common_layers import SHAPE, TAKEN, model_of, num_taken, random_ids, runner_of, segment_of

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(compute_decoder_layers() is None, reason="not on this CPU, or not built"),
]


def call_of(runner: ModelRunner) -> Any:
    return runner._call


def fed(runner: ModelRunner) -> list[Tensor]:
    """Chunks, rows and a tree; of some rows no logits are wanted."""
    rng, found = random.Random(4), []
    caches = [runner.new_cache() for _ in range(3)]
    for sizes in ((40, 1, 7), (1, 1, 1), (3, 60, 1)):
        segments = []
        for cache, size in zip(caches, sizes, strict=True):
            segment = segment_of(cache, random_ids(rng, size))
            segments.append(replace(segment, logit_rows=range(size - 1, size)) if size > 10 else segment)
        for outputs in runner.forward(segments):
            found += [outputs.logits, outputs.features, outputs.sound]
        for cache, size in zip(caches, sizes, strict=True):
            cache.keep(range(size))
    tree = segment_of(caches[0], random_ids(rng, 5), [-1, 0, 0, 1, -1])
    return [*found, runner.forward([tree])[0].logits]


@pytest.mark.parametrize("name", TAKEN)
def test_a_model_that_is_called_straight_gives_the_bits_of_its_own_code(name: str, monkeypatch: Any) -> None:
    model = model_of(TAKEN[name])
    straight = runner_of(model)
    assert isinstance(call_of(straight), Straight)
    assert not call_of(straight).head._forward_pre_hooks, "nothing is left of its own code"
    monkeypatch.setattr(model_runner, "call_of", OwnCode)
    own = runner_of(model)
    assert isinstance(call_of(own), OwnCode)
    assert all(itertools.starmap(torch.equal, zip(fed(straight), fed(own), strict=True)))


class LouderLogits(hf.LlamaForCausalLM):
    def forward(self, *arguments: Any, **others: Any) -> Any:
        output = super().forward(*arguments, **others)
        output.logits = 1.5 * output.logits
        return output


class LouderEmbeddings(hf.LlamaModel):
    def forward(self, input_ids: Tensor, **others: Any) -> Any:
        return super().forward(**others | {"inputs_embeds": 2 * self.embed_tokens(input_ids)})


class NormedTwice(hf.LlamaModel):
    def forward(self, **others: Any) -> Any:
        output = super().forward(**others)
        output.last_hidden_state = self.norm(output.last_hidden_state)
        return output


def test_a_model_that_does_more_around_its_layers_is_called_by_its_own_code() -> None:
    for change in ("logits", "embeddings", "norms"):
        model = model_of(TAKEN["llama"])
        if change == "logits":
            model.__class__ = LouderLogits
        elif change == "embeddings":
            model.model.__class__ = LouderEmbeddings
        else:
            model.model.__class__ = NormedTwice
        runner = runner_of(model)
        assert num_taken(runner) == 4, "its layers are of the common kind all the same"
        assert isinstance(call_of(runner), OwnCode), change


def test_a_model_some_of_whose_layers_are_computed_by_their_own_code_is_called_by_its_own() -> None:
    runner = runner_of(model_of(lambda: hf.SmolLM3Config(**SHAPE, no_rope_layers=[1, 1, 1, 0])))
    assert isinstance(call_of(runner), OwnCode)


def test_layers_that_follow_each_other_are_computed_by_the_first_of_them() -> None:
    runner = runner_of(model_of(lambda: hf.SmolLM3Config(**SHAPE, no_rope_layers=[1, 1, 0, 1])))
    led = [getattr(layer, "num_led", None) for layer in runner.model.model.layers]  # type: ignore[operator, union-attr]
    assert led == [2, 0, None, 1]
