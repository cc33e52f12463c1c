"""Whatever cannot be served is refused at load, by proof and not by name."""

from __future__ import annotations

import logging
from functools import partial

import pytest
import torch
import transformers as hf

from specdec.backends import packed_pass
from specdec.core.rounds import ModelInfo
from specdec.passes.rows import Segment
from specdec.runner import model_runner, probe
from specdec.runner.model_runner import ModelRunner
from tests.models.backends import backend

pytestmark = pytest.mark.usefixtures("one_thread")

VOCAB = 96
_SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
)
_GQA = dict(**_SHAPE, num_key_value_heads=2)
_LAYERS = ["sliding_attention", "full_attention"]
_OF_LAYERS = dict(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)

ACCEPTED = {
    "llama": lambda: hf.LlamaConfig(**_GQA),
    "mistral, sliding": lambda: hf.MistralConfig(**_GQA, sliding_window=32),
    "gemma2, sliding and softcapped": lambda: hf.Gemma2Config(
        **_GQA, head_dim=16, sliding_window=32, attn_logit_softcapping=2.0
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**_GQA, head_dim=16, sliding_window=32, layer_types=_LAYERS),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64, bos_token_id=0, eos_token_id=0
    ),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=64, word_embed_proj_dim=64, pad_token_id=1, bos_token_id=0, eos_token_id=0,
    ),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(
        **_GQA, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "deepseek-v3, latent attention": lambda: hf.DeepseekV3Config(
        **_SHAPE, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32,
        first_k_dense_replace=1, n_shared_experts=1,
    ),
}  # fmt: skip
REFUSED = {
    "a state instead of keys": lambda: hf.MambaConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, state_size=8
    ),
    "a convolution in every other layer": lambda: hf.Lfm2Config(**_GQA, layer_types=["conv", "full_attention"]),
    "linear attention in every other layer": lambda: hf.MiniMaxConfig(**_GQA, num_local_experts=2),
    "both directions": lambda: hf.BertConfig(**_SHAPE),
    "attention code of its own": lambda: hf.GPTJConfig(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=64, rotary_dim=8, bos_token_id=0, eos_token_id=0
    ),
    "biases by distance": lambda: hf.BloomConfig(**_OF_LAYERS, pad_token_id=0),
    "arguments that do not reach its attention": lambda: hf.StableLmConfig(**_GQA),
    "chunked attention": lambda: hf.Llama4TextConfig(
        **_GQA, head_dim=16, num_local_experts=2, attention_chunk_size=32, intermediate_size_mlp=96,
        layer_types=["chunked_attention", "full_attention"],
    ),
}  # fmt: skip


def model_of(make_config, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(make_config(), dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # Louder than the usual 0.02, so that attention matters.
            torch.nn.init.normal_(parameter, std=0.15)
    return model


def prove(model: torch.nn.Module) -> ModelRunner:
    expected = probe.plain_logits(model, VOCAB)
    info = ModelInfo("tiny", "", VOCAB, "", 64)
    return probe.prove(partial(ModelRunner, model, info, probe.NUM_SLOTS, backend()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ACCEPTED)
def test_a_model_that_works_is_accepted_and_left_as_it_was(name, dtype):
    model = model_of(ACCEPTED[name], dtype)
    runner = prove(model)
    assert runner.pool.num_used == 0
    for owner in (*model.modules(), model.config):
        assert getattr(owner, "sliding_window", None) in (None, 32)


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_does_not_work_is_refused_with_a_reason(name):
    with pytest.raises(ValueError, match=r"keeps its whole state in keys and values"):
        prove(model_of(REFUSED[name]))


@pytest.mark.parametrize("name", ["a convolution in every other layer", "biases by distance", "chunked attention"])
def test_rounding_does_not_hide_it(name):
    with pytest.raises(ValueError, match=r"off by \d+\.\d% of their spread"):
        prove(model_of(REFUSED[name], torch.bfloat16))


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
                    each.token_ids,
                    range(-1, len(each.token_ids) - 1) if mistake == "parents" else each.parents,
                    max(0, each.num_context - (mistake == "num_context")),
                    each.block_table,
                    each.logit_rows,
                )
                for each in segments
            ]
            super().__init__(wrong, block_size)

    monkeypatch.setattr(model_runner, "PassRows", Wrong)
    with pytest.raises(ValueError, match="off by"):
        prove(model_of(ACCEPTED["llama"]))


def test_a_model_that_fails_is_refused_in_words(monkeypatch):
    model = model_of(ACCEPTED["llama"])
    monkeypatch.setattr(type(model), "forward", lambda *_, **__: 1 / 0)
    with pytest.raises(ValueError, match=r"plain forward pass of this model fails \(ZeroDivisionError: division"):
        prove(model)


def test_rows_that_depend_on_their_company_are_reported(monkeypatch, caplog):
    caplog.set_level(logging.INFO, probe.__name__)
    prove(model_of(ACCEPTED["llama"]))
    assert "agree" in caplog.text
    assert "company" not in caplog.text
    plain = hf.models.llama.modeling_llama.LlamaMLP.forward

    def by_number(self, rows):
        return plain(self, rows) * (1 + 1e-6 * rows.shape[1])

    monkeypatch.setattr(hf.models.llama.modeling_llama.LlamaMLP, "forward", by_number)
    prove(model_of(ACCEPTED["llama"]))
    assert "company" in caplog.text
