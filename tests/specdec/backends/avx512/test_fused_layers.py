"""Layers that are computed in one call give what their own code gives; others are left alone, however alike."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from specdec.backends.avx512 import fused_layers
from specdec.backends.avx512.decoder_layer import DecoderLayer
from specdec.backends.avx512.fused_layers import fuse_layers
from specdec.backends.base import Backend
from specdec.core.rounds import ModelInfo
from specdec.passes.outputs import RowOutputs
from specdec.runner import probe
from specdec.runner.model_runner import ModelRunner
from tests.models.backends import backend
from tests.specdec.backends.avx512.common_layers import (
    CONTEXT,
    IN_C,
    NUM_LAYERS,
    POISON,
    SHAPE,
    TAKEN,
    VOCAB,
    model_of,
    num_taken,
    random_ids,
    runner_of,
    segment_of,
    threads_for_passes,
    told,
)

FAR = dict(rope_type="default", rope_theta=1e4, llama_4_scaling_beta=0.5, original_max_position_embeddings=64)
ALIKE: dict[str, Callable[[], hf.PreTrainedConfig]] = {
    "what is added is scaled": lambda: hf.GraniteConfig(
        **SHAPE, residual_multiplier=0.22, attention_multiplier=32**-0.5
    ),
    "norms count from one": lambda: hf.GemmaConfig(**SHAPE),
    "norms come after": lambda: hf.Olmo2Config(**SHAPE),
    "heads are normed after they are placed": lambda: hf.HunYuanDenseV1Config(**SHAPE),
    "far queries are louder": lambda: hf.Ministral3Config(**SHAPE, rope_parameters=FAR),
    "heads that do not fill registers": lambda: hf.LlamaConfig(**SHAPE | dict(head_dim=16)),
    "rows that do not fill registers": lambda: hf.LlamaConfig(**SHAPE | dict(hidden_size=72)),
    "another activation": lambda: hf.LlamaConfig(**SHAPE, hidden_act="gelu"),
}

each_number_of_threads = pytest.mark.parametrize("threads", [1, 2])
pytestmark = IN_C


@torch.inference_mode()
def plain_logits(model: Any, texts: Sequence[tuple[int, ...]]) -> Tensor:
    """After the last token of each."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    known: dict[tuple[int, ...], Tensor] = {}
    for text in sorted(texts, key=len, reverse=True):
        if text not in known:
            rows = model(torch.tensor([text]), use_cache=False).logits[0]
            known.update({text[: length + 1]: rows[length] for length in range(len(text))})
    return torch.stack([known[text] for text in texts])


def worst_row(logits: Tensor, expected: Tensor) -> float:
    return max(map(probe.relative_error, logits, expected))


def off_the_plain_model(runner: ModelRunner, model: Any) -> float:
    texts, logits = told(runner)
    return worst_row(logits, plain_logits(model, texts))


@pytest.mark.parametrize("name", TAKEN)
def test_a_layer_in_one_call_gives_what_its_own_code_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(TAKEN[name])
    runner = runner_of(model)
    assert num_taken(runner) == NUM_LAYERS
    texts, logits = told(runner)
    with monkeypatch.context() as patched:
        patched.setattr(fused_layers, "compute_decoder_layers", lambda: None)
        own = runner_of(model)
    assert num_taken(own) == 0
    _, expected = told(own)
    assert (logits == expected).float().mean() > 0.95
    assert worst_row(logits, expected) < 0.03
    assert worst_row(logits, plain_logits(model, texts)) < 0.1


@pytest.mark.parametrize("name", ALIKE)
def test_a_layer_that_computes_something_else_is_left_alone(name: str) -> None:
    model = model_of(ALIKE[name])
    runner = runner_of(model)
    assert num_taken(runner) == 0
    assert off_the_plain_model(runner, model) < 0.1


def test_layers_of_one_model_may_differ() -> None:
    """Those that give their heads no place are left alone."""
    model = model_of(lambda: hf.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1, 0]))
    runner = runner_of(model)
    assert [type(layer) is DecoderLayer for layer in runner.model.model.layers] == [True, False, True, False]
    assert off_the_plain_model(runner, model) < 0.1


def test_an_activation_that_is_like_silu_where_models_begin_is_left_alone() -> None:
    assert not any(map(fused_layers._is_silu, (torch.nn.GELU(), lambda x: torch.nn.functional.silu(x).clamp(max=1))))


def test_float32_is_left_alone() -> None:
    model = model_of(TAKEN["llama"], torch.float32)
    runner = runner_of(model)
    assert num_taken(runner) == 0
    assert off_the_plain_model(runner, model) < 1e-4


class Louder(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **others: Any) -> Tensor:
        return super().forward(hidden_states, **others) + 0.05 * hidden_states


class TurnedBack(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], **others: Any) -> Tensor:
        cos, sin = position_embeddings
        return super().forward(hidden_states, position_embeddings=(cos, -sin), **others)


class FarOnesAreLouder(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, *, position_ids: Tensor, **others: Any) -> Tensor:
        output = super().forward(hidden_states, position_ids=position_ids, **others)
        return torch.where((position_ids < CONTEXT // 2)[..., None], output, 1.1 * output)


@pytest.mark.parametrize("kind", [Louder, TurnedBack, FarOnesAreLouder])
def test_a_layer_that_differs_a_little_is_left_alone(kind: type) -> None:
    model = model_of(TAKEN["llama"])
    for layer in model.model.layers:
        layer.__class__ = kind
    runner = runner_of(model)
    assert num_taken(runner) == 0
    assert off_the_plain_model(runner, model) < 0.1


def test_norms_of_another_kind_are_left_alone() -> None:
    """They have a weight and an epsilon, too."""
    model = model_of(TAKEN["llama"])
    for layer in model.model.layers[1:]:
        layer.post_attention_layernorm = torch.nn.LayerNorm(64, dtype=torch.bfloat16)
    assert num_taken(runner_of(model)) == 1


@each_number_of_threads
@pytest.mark.parametrize("name", TAKEN)
def test_a_rows_bits_do_not_depend_on_what_it_is_packed_with(name: str, threads: int) -> None:
    """A text again and again, in other chunks, among other nodes of a tree, beside other neighbours."""
    rng, runner = random.Random(1), runner_of(model_of(TAKEN[name]))
    text = random_ids(rng, 140)
    lengths = (0, 5, 33, 130)
    neighbours = [runner.new_cache() for _ in lengths]
    for cache, length in zip(neighbours, lengths, strict=True):
        runner.forward([segment_of(cache, random_ids(rng, max(1, length)))])
        cache.keep(range(length))
    alone: list[RowOutputs] = []
    cache = runner.new_cache()
    for token in text:
        alone += runner.forward([segment_of(cache, [token])])
        cache.keep(range(1))
    num_branches = 0
    for _ in range(3 if threads == 1 else 1):
        cache = runner.new_cache()
        while len(cache) < len(text):
            num_context = len(cache)
            chunk = text[num_context:][: rng.choice([1, 2, 7, 20, 90])]
            is_own = [True] * len(chunk) + [False] * rng.choice([0, 3, 12])
            rng.shuffle(is_own)
            own = [row for row, belongs in enumerate(is_own) if belongs]
            before = dict(zip(own, [-1, *own], strict=False))
            parents = [before[row] if row in before else rng.randrange(-1, row) for row in range(len(is_own))]
            ids = random_ids(rng, len(is_own))
            for row, token in zip(own, chunk, strict=True):
                ids[row] = token
            segments = [segment_of(cache, ids, parents)]
            others = rng.sample(neighbours, rng.randrange(4))
            for other in others:
                segments.insert(rng.randrange(2), segment_of(other, random_ids(rng, rng.choice([1, 4, 9, 60]))))
            place = next(place for place, segment in enumerate(segments) if segment.token_ids is ids)
            with threads_for_passes(threads):
                outputs = runner.forward(segments)[place]
            for row, expected in zip(own, alone[num_context:], strict=False):
                assert torch.equal(outputs.logits[row], expected.logits[0]), (num_context, parents)
                assert torch.equal(outputs.features[row], expected.features[0])
            num_branches += len(chunk) < len(ids)
            runner.move(cache.keep(own))
            for other in others:
                other.keep(())
        cache.release()
    assert num_branches > 2


@each_number_of_threads
@pytest.mark.parametrize("name", ["llama", "qwen3, norms of heads", "the last one is left alone"])
def test_nothing_of_a_row_that_is_not_sound_reaches_another_text(name: str, threads: int) -> None:
    model = model_of(TAKEN.get(name, lambda: hf.SmolLM3Config(**SHAPE, no_rope_layers=[1, 1, 1, 0])))
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    runner, rng = runner_of(model), random.Random(2)
    assert num_taken(runner) == (NUM_LAYERS if name in TAKEN else NUM_LAYERS - 1)
    texts = [random_ids(rng, length) for length in (30, 9, 1)]

    def fed(texts: list[list[int]], **changes: Any) -> list[RowOutputs]:
        caches = [runner.new_cache() for _ in texts]
        segments = [replace(segment_of(*each), **changes) for each in zip(caches, texts, strict=True)]
        with threads_for_passes(threads):
            outputs = runner.forward(segments)
        for cache in caches:
            cache.release()
        return outputs

    expected = fed(texts)
    assert all(all(outputs.sound) for outputs in expected)
    spoilt = [texts[0], [*texts[1][:4], POISON, *texts[1][5:]], texts[2]]
    outputs = fed(spoilt)
    assert torch.equal(outputs[1].logits[:4], expected[1].logits[:4])
    # Also where no logits are looked at.
    for each in (outputs, fed(spoilt, logit_rows=[])):
        assert each[1].sound[:5] == [True] * 4 + [False]
        assert all(each[0].sound)
        assert all(each[2].sound)
    again = fed(texts)  # in the slots that it had
    for number in (0, 2):
        assert torch.equal(outputs[number].logits, expected[number].logits)
        assert torch.equal(again[number].logits, expected[number].logits)


def prove() -> ModelRunner:
    model = model_of(lambda: hf.MistralConfig(**SHAPE, sliding_window=32))
    expected = probe.plain_logits(model, VOCAB)
    return probe.prove(
        partial(ModelRunner, model, ModelInfo("tiny", "", VOCAB, "", CONTEXT), probe.NUM_SLOTS, backend()), expected
    )


def test_a_window_is_short_while_a_model_is_proved() -> None:
    runner = prove()
    assert num_taken(runner) == NUM_LAYERS
    assert [layer.sliding_window for layer in runner.model.model.layers] == [32] * NUM_LAYERS


def test_a_window_that_a_layer_does_not_keep_to_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_windows(model: hf.PreTrainedModel, backend: Backend) -> None:
        fuse_layers(model, backend)
        for layer in model.model.layers:
            layer.sliding_window = None

    monkeypatch.setattr("specdec.backends.avx512.backend.fuse_layers", without_windows)
    with pytest.raises(ValueError, match="off by"):
        prove()
