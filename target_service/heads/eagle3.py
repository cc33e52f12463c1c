"""An EAGLE-3 head over packed rows: one decoder layer that reads a token and the state before it.

Row r has token r of the text and the state at r - 1, and says which token follows. Where that state is not known, as at
position 0, it is 0. Below the text a row's state is the head's own output for the row before. (Li et al. 2025,
"EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test".)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.backends.base import Backend
from specdec.backends.packed_pass import PackedPass
from specdec.core.device import indices
from target_service.heads.checkpoint import HeadFiles


class Eagle3Head(nn.Module):
    """``target`` gives the embedding, and the output where the head has none of its own.

    ``norm_before_residual``: whether the layer adds to the normed state or to the state itself.
    """

    fc: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    o_proj: Any
    gate_proj: Any
    up_proj: Any
    down_proj: Any
    input_layernorm: Tensor
    hidden_norm: Tensor
    post_attention_layernorm: Tensor
    norm: Tensor

    def __init__(self, files: HeadFiles, target: Any, vocab_size: int, backend: Backend) -> None:
        """Raises ValueError if the head does not fit the target."""
        super().__init__()
        weights, config = files.weights, files.config
        self.embedding: Any = target.get_input_embeddings()
        like = self.embedding.weight
        hidden_size = like.shape[1]
        self.hidden_size, self.kind = hidden_size, files.kind
        self.norm_before_residual = bool(config.get("norm_before_residual"))
        heads = int(config["num_attention_heads"])
        self._head_dim = int(config.get("head_dim") or hidden_size // heads)
        self._eps = float(config.get("rms_norm_eps", 1e-6))
        self._scale = 1 / math.sqrt(self._head_dim)
        if weights["fc.weight"].shape[0] != hidden_size or weights["fc.weight"].shape[1] % hidden_size:
            raise ValueError(
                f"the head {files.name} reads states of {weights['fc.weight'].shape[0]} numbers, and the target's have "
                f"{hidden_size}"
            )
        self.num_taps = weights["fc.weight"].shape[1] // hidden_size
        ids = files.ids if files.ids is not None else torch.arange(vocab_size)
        if int(ids.max()) >= vocab_size or int(ids.min()) < 0:
            raise ValueError(f"the head {files.name} draws tokens that the target does not have")
        output = weights.get("lm_head.weight")
        if output is None:
            output = target.get_output_embeddings().weight[:vocab_size][ids.to(like.device)]
        if output.shape != (len(ids), hidden_size):
            raise ValueError(f"the output of the head {files.name} has the shape {tuple(output.shape)}")
        for name, tensor in weights.items():
            if name.endswith("_proj.weight") or name == "fc.weight":
                linear = nn.Linear(tensor.shape[1], tensor.shape[0], bias=False, device="meta")
                linear.weight = nn.Parameter(tensor.to(like.device, like.dtype), requires_grad=False)
                setattr(self, _attribute(name), linear)
            elif name.endswith("norm.weight"):
                self.register_buffer(_attribute(name), tensor.to(like.device, like.dtype))
        self.output = nn.Linear(hidden_size, len(ids), bias=False, device="meta")
        self.output.weight = nn.Parameter(output.to(like.device, like.dtype), requires_grad=False)
        self.ids = ids.to(like.device)
        half = self._head_dim // 2
        self._rates = files.rope_theta ** (-torch.arange(half, device=like.device, dtype=torch.float32) / half)
        backend.pack(self)

    def fused(self, taps: Tensor) -> Tensor:  # [rows, taps * hidden_size] -> [rows, hidden_size]
        """The state of each row, from the target's states at all taps."""
        found: Tensor = self.fc(taps)
        return found

    @torch.inference_mode()
    def rows(
        self, token_ids: Sequence[int], states: Tensor, positions: Sequence[int], packed_pass: PackedPass, layer: int
    ) -> Tensor:  # [rows, hidden_size]
        """The head's own states of the rows. Stores their keys and values as those of ``layer``."""
        embedded = self.embedding(indices(token_ids, states.device))
        normed = self._normed(states, self.hidden_norm)
        wide = torch.cat([self._normed(embedded, self.input_layernorm), normed], -1)
        angles = indices(positions, states.device)[:, None].float() * self._rates
        cos, sin = angles.cos().to(wide.dtype)[:, None], angles.sin().to(wide.dtype)[:, None]
        query, key, value = (
            project(wide).view(len(wide), -1, self._head_dim) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        attended = packed_pass.attend(
            layer, _rotated(query, cos, sin), _rotated(key, cos, sin), value, self._scale, None, None
        )
        states = (normed if self.norm_before_residual else states) + self.o_proj(attended.flatten(1))
        normed = self._normed(states, self.post_attention_layernorm)
        found: Tensor = states + self.down_proj(F.silu(self.gate_proj(normed)) * self.up_proj(normed))
        return found

    def logits(self, states: Tensor) -> Tensor:  # [rows, hidden_size] -> [rows, draft vocabulary]
        """Of the tokens ``ids``."""
        found: Tensor = self.output(self._normed(states, self.norm))
        return found

    def _normed(self, rows: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(rows, rows.shape[-1:], weight, self._eps)


def _attribute(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
