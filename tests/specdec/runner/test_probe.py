"""A model that cannot be served is refused at load, by proof and not by name."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch
import transformers as hf

from specdec.backends import packed_pass
from specdec.core.rounds import ModelInfo
from specdec.passes.rows import Segment
from specdec.runner import model_runner, probe
from specdec.runner.model_runner import ModelRunner
from tests.models.backends import backend
from tests.specdec.runner.tiny_models import ACCEPTED, CONTEXT, GQA, LAYERS, REFUSED, VOCAB, WINDOW, model_of


def prove(model: torch.nn.Module) -> ModelRunner:
    info = ModelInfo("tiny", "", VOCAB, "", CONTEXT)
    expected = probe.plain_logits(model, info)
    return probe.prove(model, info, backend(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_model_that_works_is_accepted_and_left_as_it_was(name, dtype):
    model = model_of(ACCEPTED[name], dtype)
    runner = prove(model)
    assert runner.pool.num_used == 0
    for owner in (*model.modules(), model.config):
        assert getattr(owner, "sliding_window", None) in (None, WINDOW)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_not_work_is_refused_by_name_with_its_reason(name):
    make_config, reason = REFUSED[name]
    model = model_of(make_config)
    with pytest.raises(ValueError, match=f"{type(model).__name__} cannot be served: {reason}"):
        prove(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_an_argument_of_attention_that_is_not_known_is_refused_by_name_whatever_its_weight(dtype):
    """Comparing logits would miss it: rounding to 16 bits hides sinks this small."""
    model = model_of(REFUSED["sinks"][0], dtype)
    for name, parameter in model.named_parameters():
        if name.endswith("sinks"):
            parameter.data.fill_(-20.0)
    with pytest.raises(ValueError, match="its attention depends on s_aux, which packed attention does not know"):
        prove(model)


NOTHING = dict(dropout=0.0, is_causal=True, position_ids=torch.arange(3)[None], use_cache=False, s_aux=None)
UNKNOWN = [dict(s_aux=torch.zeros(4)), dict(dropout=0.1), dict(is_causal=False), dict(attention_mask=torch.ones(1, 3))]


@pytest.mark.parametrize("unknown", UNKNOWN, ids=lambda unknown: next(iter(unknown)))
def test_attention_refuses_what_would_change_its_result_and_nothing_else(unknown):
    packed = SimpleNamespace(attend=lambda layer, query, *_, **options: query)
    tensors = [torch.ones(1, 2, 3, 4)] * 3
    rest = NOTHING | {"attention_mask": None, "packed_pass": packed}
    assert packed_pass.packed_attention(SimpleNamespace(layer_idx=0), *tensors, **rest)[0].shape == (1, 3, 2, 4)
    with pytest.raises(NotImplementedError, match=next(iter(unknown))):
        packed_pass.packed_attention(SimpleNamespace(layer_idx=0), *tensors, **rest | unknown)


@pytest.mark.parametrize("name", ["a convolution in every other layer", "biases by distance", "chunked attention"])
def test_rounding_to_bfloat16_hides_no_wrong_model(name):
    make_config, reason = REFUSED[name]
    with pytest.raises(ValueError, match=rf"{reason}.* off by \d+\.\d% of their spread"):
        prove(model_of(make_config, torch.bfloat16))


def test_a_window_that_attention_is_not_told_of_is_found(monkeypatch):
    """Its length in the checkpoint is far beyond what a probe feeds."""

    def unlimited(*arguments, sliding_window=None, **others):
        return packed_pass.packed_attention(*arguments, **others)

    monkeypatch.setitem(hf.AttentionInterface._global_mapping, packed_pass.ATTENTION, unlimited)
    prove(model_of(ACCEPTED["llama"]))
    for name in ("mistral, sliding", "gemma3"):
        with pytest.raises(ValueError, match="off by"):
            prove(model_of(ACCEPTED[name]))


@pytest.mark.parametrize("mistake", ["parents", "num_context"])
def test_wrong_trees_and_positions_are_found(monkeypatch, mistake):
    class Wrong(model_runner.PassRows):
        def __init__(self, segments, block_size):
            wrong = [
                Segment(
                    segment.token_ids,
                    range(-1, len(segment.token_ids) - 1) if mistake == "parents" else segment.parents,
                    max(0, segment.num_context - (mistake == "num_context")),
                    segment.block_table,
                    segment.logit_rows,
                )
                for segment in segments
            ]
            super().__init__(wrong, block_size)

    monkeypatch.setattr(model_runner, "PassRows", Wrong)
    with pytest.raises(ValueError, match="off by"):
        prove(model_of(ACCEPTED["llama"]))


def test_a_model_that_fails_is_refused_in_words(monkeypatch):
    model = model_of(ACCEPTED["llama"])
    model.model.norm.weight.data[3] = torch.nan
    with pytest.raises(ValueError, match=r"plain forward pass of LlamaForCausalLM gives NaN"):
        prove(model)
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ValueError, match=r"plain forward pass of LlamaForCausalLM fails \(ZeroDivisionError: division"):
        prove(model)


def longrope(layer_type: str | None) -> hf.PreTrainedConfig:
    """Positions of a pass are encoded by the largest of them: of all layers, or of those of one type."""
    long = dict(rope_type="longrope", rope_theta=1e4, original_max_position_embeddings=CONTEXT // 2, factor=2.0)
    long |= dict(short_factor=[1.0] * 8, long_factor=[1.5 + i for i in range(8)])
    if layer_type is None:
        return hf.Phi3Config(**GQA, rope_parameters=long, original_max_position_embeddings=CONTEXT // 2)
    ropes = {layer: dict(rope_type="default", rope_theta=1e4) for layer in LAYERS} | {layer_type: long}
    return hf.Gemma3TextConfig(**GQA, head_dim=16, layer_types=LAYERS, rope_parameters=ropes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layer_type", [None, *LAYERS])
def test_positions_that_another_text_changes_within_the_context_are_found(dtype, layer_type):
    model = model_of(lambda: longrope(layer_type), dtype)
    with pytest.raises(ValueError, match=r"near the end of its context \(64\) changes how all positions"):
        prove(model)
    probe.plain_logits(model, ModelInfo("tiny", "", VOCAB, "", CONTEXT // 2))


def test_rows_that_depend_on_their_company_are_reported(monkeypatch, caplog):
    caplog.set_level(logging.INFO, probe.__name__)
    prove(model_of(ACCEPTED["llama"]))
    assert "agree" in caplog.text
    assert "depend on" not in caplog.text
    plain = hf.models.llama.modeling_llama.LlamaMLP.forward

    def by_number(self, rows):
        return plain(self, rows) * (1 + 1e-6 * rows.shape[1])

    monkeypatch.setattr(hf.models.llama.modeling_llama.LlamaMLP, "forward", by_number)
    prove(model_of(ACCEPTED["llama"]))
    assert "depend on" in caplog.text
