"""Layers in one call give what their own code gives; other layers are left alone, however alike they are."""

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
    outputs_of,
    random_ids,
    runner_of,
    segment_of,
    threads_for_passes,
)


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


class ClampedSilu(torch.nn.SiLU):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs).clamp(max=20)


def changed(change: Callable[[Any], None]) -> Any:
    """A llama with a change to each of its layers."""
    model = model_of(TAKEN["llama"])
    for layer in model.model.layers:
        change(layer)
    return model


def of_class(kind: type) -> Callable[[], Any]:
    return lambda: changed(lambda layer: setattr(layer, "__class__", kind))


FAR = dict(rope_type="default", rope_theta=1e4, llama_4_scaling_beta=0.5, original_max_position_embeddings=64)
CONFIGS: dict[str, Callable[[], hf.PreTrainedConfig]] = {
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
ALIKE: dict[str, Callable[[], Any]] = {
    **{name: partial(model_of, config) for name, config in CONFIGS.items()},
    "a louder layer": of_class(Louder),
    "rotated back": of_class(TurnedBack),
    "far rows are louder": of_class(FarOnesAreLouder),
    "like silu where models begin": lambda: changed(lambda layer: setattr(layer.mlp, "act_fn", ClampedSilu())),
    "float32": partial(model_of, TAKEN["llama"], torch.float32),
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
    texts, logits = outputs_of(runner)
    return worst_row(logits, plain_logits(model, texts))


@pytest.mark.parametrize("name", TAKEN)
def test_a_layer_in_one_call_gives_what_its_own_code_gives(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of(TAKEN[name])
    runner = runner_of(model)
    assert num_taken(runner) == NUM_LAYERS
    texts, logits = outputs_of(runner)
    with monkeypatch.context() as patched:
        patched.setattr(fused_layers, "compute_decoder_layers", lambda: None)
        plain_runner = runner_of(model)
    assert num_taken(plain_runner) == 0
    _, expected = outputs_of(plain_runner)
    assert (logits == expected).float().mean() > 0.95
    assert worst_row(logits, expected) < 0.03
    assert worst_row(logits, plain_logits(model, texts)) < 0.1


@pytest.mark.parametrize("name", ALIKE)
def test_a_layer_that_computes_something_else_is_left_alone(name: str) -> None:
    model = ALIKE[name]()
    runner = runner_of(model)
    assert num_taken(runner) == 0
    assert off_the_plain_model(runner, model) < (1e-4 if name == "float32" else 0.1)


def test_layers_of_one_model_may_differ() -> None:
    """Layers without rotary positions are left alone, and those with norms of another kind."""
    model = model_of(lambda: hf.SmolLM3Config(**SHAPE, no_rope_layers=[1, 0, 1, 0]))
    runner = runner_of(model)
    assert [type(layer) is DecoderLayer for layer in runner.model.model.layers] == [True, False, True, False]
    assert off_the_plain_model(runner, model) < 0.1
    model = model_of(TAKEN["llama"])
    for layer in model.model.layers[1:]:
        layer.post_attention_layernorm = torch.nn.LayerNorm(64, dtype=torch.bfloat16)
    assert num_taken(runner_of(model)) == 1


@each_number_of_threads
@pytest.mark.parametrize("name", TAKEN)
def test_a_rows_bits_do_not_depend_on_what_it_is_packed_with(name: str, threads: int) -> None:
    """One text, row by row and then in chunks, each with branches below it and beside other sequences."""
    rng, runner = random.Random(1), runner_of(model_of(TAKEN[name]))
    text, cache, neighbours = random_ids(rng, 140), runner.new_cache(), [runner.new_cache() for _ in range(3)]
    alone: list[RowOutputs] = []
    for token in text:
        alone += runner.forward([segment_of(cache, [token])])
        cache.keep(range(1))
    for _ in range(2):
        cache = runner.new_cache()
        while (start := len(cache)) < len(text):
            chunk = text[start:][: rng.choice([1, 2, 7, 20, 90])]
            branches = rng.choice([0, 3, 12])
            parents = [*range(-1, len(chunk) - 1), *(rng.randrange(-1, len(chunk) + row) for row in range(branches))]
            plain_runner = segment_of(cache, [*chunk, *random_ids(rng, branches)], parents)
            others = [segment_of(c, random_ids(rng, rng.choice([1, 4, 9, 60]))) for c in neighbours[rng.randrange(4) :]]
            place = rng.randint(0, len(others))
            with threads_for_passes(threads):
                outputs = runner.forward([*others[:place], plain_runner, *others[place:]])[place]
            for row, expected in enumerate(alone[start : start + len(chunk)]):
                assert torch.equal(outputs.logits[row], expected.logits[0]), (start, parents)
            cache.keep(range(len(chunk)))
            for other in neighbours:
                other.keep(())
        cache.release()


@each_number_of_threads
@pytest.mark.parametrize("name", ["llama", "qwen3, norms of heads", "the last one is left alone"])
def test_nothing_of_an_unsound_row_reaches_another_text(name: str, threads: int) -> None:
    model = model_of(TAKEN.get(name, lambda: hf.SmolLM3Config(**SHAPE, no_rope_layers=[1, 1, 1, 0])))
    with torch.no_grad():
        model.get_input_embeddings().weight[POISON] = torch.nan
    runner, rng = runner_of(model), random.Random(2)
    assert num_taken(runner) == (NUM_LAYERS if name in TAKEN else NUM_LAYERS - 1)
    texts = [random_ids(rng, length) for length in (30, 9, 1)]
    spoilt = [texts[0], [*texts[1][:4], POISON, *texts[1][5:]], texts[2]]

    def fed(texts: list[list[int]], **changes: Any) -> list[RowOutputs]:
        caches = [runner.new_cache() for _ in texts]
        segments = [replace(segment_of(*pair), **changes) for pair in zip(caches, texts, strict=True)]
        with threads_for_passes(threads):
            outputs = runner.forward(segments)
        for cache in caches:
            cache.release()
        return outputs

    # At last in the slots that the unsound row had.
    expected, outputs, unread, again = fed(texts), fed(spoilt), fed(spoilt, logit_rows=[]), fed(texts)
    assert all(all(pair.sound) for pair in expected)
    assert torch.equal(outputs[1].logits[:4], expected[1].logits[:4])
    for pair in (outputs, unread):
        assert pair[1].sound[:5] == [True] * 4 + [False]
        assert all((*pair[0].sound, *pair[2].sound))
    for number in (0, 2):
        assert torch.equal(outputs[number].logits, expected[number].logits)
        assert torch.equal(again[number].logits, expected[number].logits)


def prove() -> ModelRunner:
    model = model_of(lambda: hf.MistralConfig(**SHAPE, sliding_window=32))
    info = ModelInfo("tiny", "", VOCAB, "", CONTEXT)
    expected = probe.plain_logits(model, info)
    return probe.prove(model, info, backend(), expected)


def test_a_window_is_short_while_a_model_is_proved() -> None:
    runner = prove()
    assert num_taken(runner) == NUM_LAYERS
    assert [layer.sliding_window for layer in runner.model.model.layers] == [32] * NUM_LAYERS


def test_a_window_that_a_layer_ignores_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_windows(model: hf.PreTrainedModel, backend: Backend) -> None:
        fuse_layers(model, backend)
        for layer in model.model.layers:
            layer.sliding_window = None

    monkeypatch.setattr("specdec.backends.avx512.backend.fuse_layers", without_windows)
    with pytest.raises(ValueError, match="off by"):
        prove()
