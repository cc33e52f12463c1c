"""Tiny models of many architectures: those that can be served and those that cannot."""

from __future__ import annotations

import torch
import transformers as hf

VOCAB, CONTEXT, WINDOW = 96, 64, 8
_SHAPE = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=CONTEXT,
    pad_token_id=0,
    bos_token_id=0,
    eos_token_id=0,
)
GQA = dict(**_SHAPE, num_key_value_heads=2)
LAYERS = ["sliding_attention", "full_attention"]
_OF_LAYERS = dict(vocab_size=VOCAB, hidden_size=64, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)

ACCEPTED = {
    "llama": lambda: hf.LlamaConfig(**GQA),
    "qwen3": lambda: hf.Qwen3Config(**GQA, head_dim=16),
    "gpt-neox": lambda: hf.GPTNeoXConfig(**_SHAPE),
    "mistral, sliding": lambda: hf.MistralConfig(**GQA, sliding_window=WINDOW),
    "gemma2, sliding and softcapped": lambda: hf.Gemma2Config(
        **GQA, head_dim=16, sliding_window=WINDOW, attn_logit_softcapping=2.0
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**GQA, head_dim=16, sliding_window=WINDOW, layer_types=LAYERS),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, bos_token_id=0, eos_token_id=0
    ),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=64, ffn_dim=96, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=CONTEXT, word_embed_proj_dim=64, pad_token_id=1, bos_token_id=0, eos_token_id=0,
    ),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(
        **GQA, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
    ),
    "deepseek-v3, latent attention": lambda: hf.DeepseekV3Config(
        **_SHAPE, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=8,
        v_head_dim=16, n_routed_experts=4, n_group=1, topk_group=1, num_experts_per_tok=2, moe_intermediate_size=32,
        first_k_dense_replace=1, n_shared_experts=1,
    ),
}  # fmt: skip
_OWN_ATTENTION = "it does not compute its attention through transformers"
REFUSED = {
    "a state instead of keys": (
        lambda: hf.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, state_size=8),
        "it has layers of linear_attention;",
    ),
    "a convolution in every other layer": (
        lambda: hf.Lfm2Config(**GQA, layer_types=["conv", "full_attention"]),
        "it has layers of conv;",
    ),
    "linear attention in every other layer": (
        lambda: hf.MiniMaxConfig(**GQA, num_local_experts=2),
        "it has layers of linear_attention;",
    ),
    "both directions": (lambda: hf.BertConfig(**_SHAPE), "it is no decoder"),
    "attention code of its own": (
        lambda: hf.GPTJConfig(
            vocab_size=VOCAB, n_embd=64, n_layer=2, n_head=4, n_positions=CONTEXT, rotary_dim=8,
            bos_token_id=0, eos_token_id=0,
        ),
        _OWN_ATTENTION,
    ),
    "biases by distance": (lambda: hf.BloomConfig(**_OF_LAYERS, pad_token_id=0), _OWN_ATTENTION),
    "arguments that do not reach its attention": (lambda: hf.StableLmConfig(**GQA), _OWN_ATTENTION),
    "sinks": (
        lambda: hf.GptOssConfig(**GQA, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
        r".*its attention depends on s_aux,",
    ),
    "chunked attention": (
        lambda: hf.Llama4TextConfig(
            **GQA, head_dim=16, num_local_experts=2, attention_chunk_size=32, intermediate_size_mlp=96,
            layer_types=["chunked_attention", "full_attention"],
        ),
        "it has layers of chunked_attention;",
    ),
}  # fmt: skip
"""How each is made, and why it is refused."""


def model_of(make_config, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(make_config(), dtype=dtype)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            # Louder than the usual 0.02, so that attention matters.
            torch.nn.init.normal_(parameter, std=0.15)
    return model.train(False)
