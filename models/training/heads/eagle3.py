"""An EAGLE-3 head that can be trained: one decoder layer over the next token's embedding and the target's states.

Names of weights are those of SpecForge (https://github.com/sgl-project/SpecForge), which SGLang and vLLM read as well.
Row t has token t + 1 and the target's states at t, and predicts token t + 2.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.training.heads.base import Head, Lesson

_CONFIG_KEYS = (
    "head_dim",
    "hidden_act",
    "hidden_size",
    "intermediate_size",
    "max_position_embeddings",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "vocab_size",
)


class _Attention(nn.Module):
    """Grouped-query attention over an embedding and a state side by side, 2 d wide."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // self.num_heads
        wide, heads = 2 * config.hidden_size, self.num_heads * self.head_dim
        self.q_proj = nn.Linear(wide, heads, bias=False)
        self.k_proj = nn.Linear(wide, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(wide, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(heads, config.hidden_size, bias=False)


class _Mlp(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class _Layer(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _Mlp(config)
        for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
            setattr(self, name, nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))


class Eagle3(Head):
    TITLE = "EAGLE-3"
    STEPS = 5
    DECAY = 0.8

    def __init__(self, config: Any, output: Tensor, steps: int) -> None:
        super().__init__(output, steps)
        # The published choice: a low, a middle and a high state.
        self.boundaries = [2, config.num_hidden_layers // 2, config.num_hidden_layers - 3]
        self.fc = nn.Linear(3 * config.hidden_size, config.hidden_size, bias=False)
        self.midlayer = _Layer(config)
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self._theta = float(config.rope_parameters["rope_theta"])

    def start_from(self, model: Any) -> None:
        """Take what fits from the target's last layer. What reads two inputs stays random, and so does fc: a head that
        starts as the target's last state says the token that was just fed."""
        last, layer = model.model.layers[-1], self.midlayer
        pairs = [
            (last.self_attn.o_proj, layer.self_attn.o_proj),
            (last.mlp, layer.mlp),
            (last.post_attention_layernorm, layer.post_attention_layernorm),
            (model.model.norm, self.norm),
        ]
        for source, module in pairs:
            module.load_state_dict({name: value.float() for name, value in source.state_dict().items()})

    def unroll(self, embedded: Tensor, given: Lesson) -> list[Tensor]:
        """A row of step 0 sees the rows up to itself. At a later step it also sees its states of the steps before. Only
        so does a head learn to continue from its output."""
        state: Tensor = self.fc(given.taps[:, : embedded.shape[1]])
        keys: list[Tensor] = []
        values: list[Tensor] = []
        states = []
        for step in range(self.steps):
            shifted = F.pad(embedded[:, step:], (0, 0, 0, step))
            state = self._layer(shifted, state, step, keys, values)
            states.append(state)
        return states

    def logits(self, states: Tensor) -> Tensor:
        return super().logits(self.norm(states))

    def files(self, config: Any, ids: Tensor, tied: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
        is_drawable = torch.zeros(config.vocab_size, dtype=torch.bool, device=ids.device).index_fill_(0, ids, True)
        weights = {"d2t": ids - torch.arange(len(ids), device=ids.device), "t2d": is_drawable}
        if not tied:
            weights["lm_head.weight"] = self.output
        known = {key: getattr(config, key, None) for key in _CONFIG_KEYS}
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **{key: value for key, value in known.items() if value is not None},
            "num_hidden_layers": 1,
            "rope_theta": config.rope_parameters["rope_theta"],
            "draft_vocab_size": len(ids),
            "tie_word_embeddings": tied,
            # SpecForge counts the outputs of layers, so that k - 1 is our boundary k.
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [boundary - 1 for boundary in self.boundaries]},
        }, weights

    def _layer(self, embedded: Tensor, state: Tensor, step: int, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        layer = self.midlayer
        attention = layer.self_attn
        wide = torch.cat([layer.input_layernorm(embedded), layer.hidden_norm(state)], -1)
        batch, rows, _ = wide.shape

        def heads(projected: Tensor, count: int) -> Tensor:
            return projected.view(batch, rows, count, attention.head_dim).transpose(1, 2)

        query = self._rotated(heads(attention.q_proj(wide), attention.num_heads), step)
        key = self._rotated(heads(attention.k_proj(wide), attention.num_kv_heads), step)
        value = heads(attention.v_proj(wide), attention.num_kv_heads)
        group = attention.num_heads // attention.num_kv_heads
        keys.append(key.repeat_interleave(group, 1))
        values.append(value.repeat_interleave(group, 1))
        later = torch.ones(rows, rows, dtype=torch.bool, device=wide.device).triu(1)
        scale = 1 / math.sqrt(attention.head_dim)
        scores = (query @ keys[0].transpose(2, 3) * scale).masked_fill(later, float("-inf"))
        of_steps = [(query * past).sum(-1, keepdim=True) * scale for past in keys[1:]]
        weights = torch.cat([scores.float(), *(score.float() for score in of_steps)], -1).softmax(-1).to(value.dtype)
        mixed = weights[..., :rows] @ values[0]
        for index, past in enumerate(values[1:]):
            mixed = mixed + weights[..., rows + index, None] * past
        state = state + attention.o_proj(mixed.transpose(1, 2).reshape(batch, rows, -1))
        return state + layer.mlp(layer.post_attention_layernorm(state))

    def _rotated(self, x: Tensor, step: int) -> Tensor:
        """Rotary embedding. Row t of a step is at position t + 1 + step."""
        half = x.shape[-1] // 2
        rates = self._theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
        positions = torch.arange(x.shape[2], device=x.device, dtype=torch.float32) + 1 + step
        angles = (positions[:, None] * rates).to(torch.float32)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
