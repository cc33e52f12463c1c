"""A model in one call gives what its own code gives; other models are called by their own code."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor

from specdec.backends.avx512.decoder_pass import DecoderPass
from specdec.backends.torch.model_code import ModelCode
from specdec.passes.outputs import RowOutputs
from specdec.runner.model_runner import ModelRunner
from tests.specdec.backends.avx512.common_layers import (
    CONTEXT,
    IN_C,
    SHAPE,
    TAKEN,
    VOCAB,
    model_of,
    num_taken,
    random_ids,
    runner_of,
    segment_of,
    with_call,
)

pytestmark = IN_C


def fed(runner: ModelRunner) -> list[RowOutputs]:
    """Chunks, rows and a tree; of some rows no logits are wanted."""
    rng = random.Random(4)
    results: list[RowOutputs] = []
    caches = [runner.new_cache() for _ in range(3)]
    for sizes in ((40, 1, 7), (1, 1, 1), (3, 60, 1)):
        segments = []
        for cache, size in zip(caches, sizes, strict=True):
            segment = segment_of(cache, random_ids(rng, size))
            segments.append(replace(segment, logit_rows=range(size - 1, size)) if size > 10 else segment)
        results += runner.forward(segments)
        for cache, size in zip(caches, sizes, strict=True):
            cache.keep(range(size))
    tree = segment_of(caches[0], random_ids(rng, 5), [-1, 0, 0, 1, -1])
    return [*results, *runner.forward([tree])]


def features_of(outputs: RowOutputs) -> Tensor:  # [logit rows, hidden_size]
    """What the output embedding got."""
    return outputs._pass.features[list(outputs._logit_rows)]


def by_its_own_code(model: Any, monkeypatch: Any) -> ModelRunner:
    with monkeypatch.context() as patch:
        patch.setattr("specdec.backends.avx512.backend.in_one_call", lambda *_: None)
        runner, call = with_call(model)
    assert isinstance(call, ModelCode)
    return runner


@pytest.mark.parametrize("name", TAKEN)
def test_a_model_in_one_call_gives_what_its_own_code_gives(name: str, monkeypatch: Any) -> None:
    """Except for the order in which the last norm sums, which changes some last bits of what the head reads."""
    model = model_of(TAKEN[name])
    at_once, call = with_call(model)
    assert isinstance(call, DecoderPass)
    num_equal = num = 0
    for results, expected in zip(fed(at_once), fed(by_its_own_code(model, monkeypatch)), strict=True):
        assert results.sound == expected.sound
        assert torch.equal(results.logits, call.head(features_of(results)))
        num_equal += int((features_of(results) == features_of(expected)).sum())
        num += features_of(results).numel()
        torch.testing.assert_close(features_of(results), features_of(expected), rtol=2**-7, atol=1e-6)
    assert num_equal > 0.9 * num


def test_positions_far_beyond_the_context_are_encoded_as_by_the_models_own_code(monkeypatch: Any) -> None:
    """Positions that the first pass needs, later ones, and those beyond the context."""
    model = model_of(TAKEN["llama"])
    runners = [runner_of(model), by_its_own_code(model, monkeypatch)]
    caches = [runner.new_cache() for runner in runners]
    rng = random.Random(5)
    for size in (7, 93, 500, CONTEXT + 300):
        ids = random_ids(rng, size)
        [results], [expected] = (
            runner.forward([segment_of(cache, ids)]) for runner, cache in zip(runners, caches, strict=True)
        )
        for cache in caches:
            cache.keep(range(size))
        torch.testing.assert_close(features_of(results), features_of(expected), rtol=2**-7, atol=1e-6)
        assert (features_of(results) == features_of(expected)).float().mean() > 0.9


def test_a_token_that_the_model_does_not_have_is_an_error_and_no_crash() -> None:
    runner = runner_of(model_of(TAKEN["llama"]))
    for token in (-1, VOCAB, 2**40):
        with pytest.raises(IndexError, match="token id"):
            runner.forward([segment_of(runner.new_cache(), [1, token])])


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
def test_a_row_with_logits_of_nan_or_infinity_is_not_sound(wrong: float) -> None:
    """-inf is a way to rule a token out, unless it is all of them."""
    runner, call = with_call(model_of(TAKEN["tiles that are not full, biases everywhere"]))
    ids = random_ids(random.Random(0), 4)

    def sound() -> list[bool]:
        return runner.forward([segment_of(runner.new_cache(), ids)])[0].sound

    assert sound() == [True] * 4
    bias = torch.zeros(VOCAB)
    call.head.described.bias = call._ends.head.bias = bias.data_ptr()
    bias[VOCAB - 1] = wrong
    assert sound() == [wrong == -math.inf] * 4
    bias[:] = wrong
    assert sound() == [False] * 4


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


class Narrowed(hf.LlamaModel):
    def forward(self, **others: Any) -> Any:
        output = super().forward(**others)
        output.last_hidden_state = self.narrow(output.last_hidden_state)
        return output


def louder_logits(model: Any) -> None:
    model.__class__ = LouderLogits


def louder_embeddings(model: Any) -> None:
    model.model.__class__ = LouderEmbeddings


def normed_twice(model: Any) -> None:
    model.model.__class__ = NormedTwice


def fewer_features_for_the_head(model: Any) -> None:
    size, vocab_size = model.config.hidden_size, model.config.vocab_size
    model.model.__class__ = Narrowed
    model.model.narrow = torch.nn.Linear(size, size // 2, bias=False, dtype=torch.bfloat16)
    model.lm_head = torch.nn.Linear(size // 2, vocab_size, bias=False, dtype=torch.bfloat16)


@pytest.mark.parametrize("change", [louder_logits, louder_embeddings, normed_twice, fewer_features_for_the_head])
def test_a_model_that_does_more_around_its_layers_is_called_by_its_own_code(change: Callable[[Any], None]) -> None:
    model = model_of(TAKEN["llama"])
    change(model)
    runner, call = with_call(model)
    assert num_taken(runner) == 4, "its layers are of the common kind all the same"
    assert isinstance(call, ModelCode)


def test_consecutive_layers_are_computed_by_the_first_and_a_model_with_another_layer_by_its_own_code() -> None:
    runner, call = with_call(model_of(lambda: hf.SmolLM3Config(**SHAPE, no_rope_layers=[1, 1, 0, 1])))
    assert isinstance(call, ModelCode)
    led = [getattr(layer, "num_led", None) for layer in runner.model.model.layers]  # type: ignore[operator, union-attr]
    assert led == [2, 0, None, 1]
