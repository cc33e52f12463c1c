"""How a decoder layer next to a model computes, by its own config.json: activation, rotary angles, window."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import LlamaConfig
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

_KNOWN = (
    *("num_attention_heads", "head_dim", "rms_norm_eps", "hidden_act", "max_position_embeddings"),
    *("rope_theta", "rope_scaling", "rope_parameters"),
)
_ROPES = ("default", "linear", "llama3", "yarn")
"""Those of which the angles depend on the position alone."""


@dataclass(frozen=True)
class LayerOptions:
    """``rates`` [head_dim / 2]: angles per position; ``rotary_scale``: of their cosines and sines. ``window``: the
    latest tokens that a row sees; None: all."""

    num_heads: int
    head_dim: int
    eps: float
    activation: Callable[[Tensor], Tensor]
    rates: Tensor
    rotary_scale: float
    window: int | None

    @staticmethod
    def read(config: Mapping[str, Any], hidden_size: int) -> LayerOptions:
        """Raises an exception of any kind for values that cannot be used; ValueError names what is not supported."""
        if config.get("num_attention_heads") is None:
            raise ValueError("it has no num_attention_heads")
        given = {name: copy.deepcopy(config[name]) for name in _KNOWN if config.get(name) is not None}
        if "head_dim" in given:  # then the number of heads need not divide the hidden size
            hidden_size = given["num_attention_heads"] * given["head_dim"]
        read = LlamaConfig(hidden_size=hidden_size, **given)
        rope: Mapping[str, Any] = read.rope_parameters or {}
        if any(isinstance(value, dict) for value in rope.values()):
            raise ValueError("its rope_parameters are by type of layer, which is not supported")
        if rope["rope_type"] not in _ROPES:
            raise ValueError(f"its rope_scaling is {rope['rope_type']}, which is not supported")
        if rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1) != 1:
            raise ValueError("it has partial_rotary_factor, which is not supported")
        if read.hidden_act not in ACT2FN:
            raise ValueError(f"its hidden_act is {read.hidden_act}, which is not supported")
        rotary = LlamaRotaryEmbedding(read)
        if not rotary.inv_freq.isfinite().all():
            raise ValueError("the angles of its rope_theta and rope_scaling are infinite")
        return LayerOptions(
            num_heads=read.num_attention_heads,
            head_dim=int(read.head_dim or 0),
            eps=float(read.rms_norm_eps),
            activation=ACT2FN[read.hidden_act],
            rates=rotary.inv_freq,
            rotary_scale=float(rotary.attention_scaling),
            window=_window(config),
        )


def _window(config: Mapping[str, Any]) -> int | None:
    window = config.get("sliding_window")
    if window is None or not config.get("use_sliding_window", True):
        return None
    if type(window) is not int or window < 1:
        raise ValueError(f"its sliding_window is {window!r}")
    types = config.get("layer_types") or ["sliding_attention"]
    return window if types[0] == "sliding_attention" else None
