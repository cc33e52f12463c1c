"""Heads of EAGLE's kind over packed rows: one decoder layer that reads a token and the state before it.

Row r has token r of the text and the state at r - 1, and predicts the next token. Where that state is not known, as at
position 0, it is 0. Below the text a row's state is the head's output for the row before. EAGLE-1, EAGLE-2 and HASS
have the same files and read the target's last state (Li et al. 2024, "EAGLE: Speculative Sampling Requires Rethinking
Feature Uncertainty"); EAGLE-3 reads three states between layers (Li et al. 2025, "EAGLE-3: Scaling up Inference
Acceleration of Large Language Models via Training-Time Test").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.backends.base import Backend
from specdec.backends.packed_pass import PackedPass
from specdec.backends.side_layer import SideLayer
from specdec.core.device import indices
from target_service.heads.checkpoint import EAGLE3, HeadFiles
from target_service.heads.weights import embedding_of, linear, output_of


class RecurrentHead(nn.Module):
    """``target`` gives the embedding, and the output where the head has none.

    ``other_reading``: of EAGLE-3, whether the layer adds to the normed state instead of the state itself; of EAGLE,
    whether the state comes before the embedding. Folders are silent about both (target_service.heads.proof).
    ``feeds_normed``: its states are those after the last norm (EAGLE 3.1).
    """

    def __init__(self, files: HeadFiles, target: Any, vocab_size: int, backend: Backend) -> None:
        """Raises ValueError if the head does not fit the target."""
        super().__init__()
        weights, config = files.weights, files.config
        assert files.layer is not None, "EAGLE's kinds have it"
        self.options = files.layer
        self.embedding: Any = embedding_of(files, target, vocab_size)
        like = target.get_input_embeddings().weight
        self.hidden_size, self.kind = like.shape[1], files.kind
        self.other_reading = bool(config.get("norm_before_residual"))
        self.feeds_normed = bool(files.feeds_normed)
        rows, columns = weights["fc.weight"].shape
        if rows != self.hidden_size or columns % self.hidden_size:
            raise ValueError(
                f"the head {files.name} reads states of {rows} numbers, and the target's have {self.hidden_size}"
            )
        self.num_taps = columns // rows if self.kind == EAGLE3 else 1
        output = weights.get("lm_head.weight")
        self.output, self.ids = output_of(files, target, vocab_size, weight=output, width=self.hidden_size)
        self._norms = {
            name.removeprefix("midlayer.").removesuffix(".weight"): tensor.to(like.device, like.dtype)
            for name, tensor in weights.items()
            if "norm." in name
        }
        self.fc: Any = _joined(weights, ["fc"], like)
        self._check_widths(files)
        self.layer: Any = SideLayer(
            files.layer,
            to_heads=_joined(weights, [f"midlayer.self_attn.{part}_proj" for part in "qkv"], like),
            o_proj=_joined(weights, ["midlayer.self_attn.o_proj"], like),
            norm=self._norms["post_attention_layernorm"],
            to_features=_joined(weights, ["midlayer.mlp.gate_proj", "midlayer.mlp.up_proj"], like),
            down_proj=_joined(weights, ["midlayer.mlp.down_proj"], like),
        )
        backend.pack(self)

    def _check_widths(self, files: HeadFiles) -> None:
        query, key, value = (len(files.weights[f"midlayer.self_attn.{part}_proj.weight"]) for part in "qkv")
        wide = self.options.num_heads * self.options.head_dim
        if query != wide or key != value or key % self.options.head_dim or wide % key:
            heads = f"{self.options.num_heads} heads of {self.options.head_dim} numbers"
            raise ValueError(f"the head {files.name} has {heads}, and projections to {query}, {key} and {value}")

    def fused(self, taps: Tensor) -> Tensor:  # [rows, taps * hidden_size] -> [rows, hidden_size]
        """The state of each row, from the target's states at all taps."""
        if self.kind != EAGLE3:
            return taps
        taps = self._normed(taps, "input_norm")
        parts = taps.chunk(self.num_taps, -1)
        fused: Tensor = self.fc(torch.cat([self._normed(part, f"fc_norm.{k}") for k, part in enumerate(parts)], -1))
        return fused

    @torch.inference_mode()
    def rows(
        self, token_ids: Sequence[int], states: Tensor, packed_pass: PackedPass, *, layer: int
    ) -> Tensor:  # [rows, hidden_size]
        """The head's states of the rows. Stores their keys and values as those of ``layer``."""
        inputs, states = self._entered(self.embedding(indices(token_ids, states.device)), states)
        outputs: Tensor = self.layer(inputs, states, packed_pass, layer=layer)
        return self._normed(outputs, "norm") if self.feeds_normed else outputs

    def _entered(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The input of the layer's attention, and what its output is added to."""
        if self.kind == EAGLE3:
            normed = self._normed(states, "hidden_norm")
            wide = torch.cat([self._normed(embedded, "input_layernorm"), normed], -1)
            return wide, normed if self.other_reading else states
        pair = (states, embedded) if self.other_reading else (embedded, states)
        joined: Tensor = self.fc(torch.cat(pair, -1))
        return self._normed(joined, "input_layernorm"), joined

    def logits(self, states: Tensor) -> Tensor:  # [rows, hidden_size] -> [rows, draft vocabulary]
        """Of the tokens ``ids``."""
        logits: Tensor = self.output(states if self.feeds_normed else self._normed(states, "norm"))
        return logits

    def _normed(self, rows: Tensor, name: str) -> Tensor:
        """By a norm that the head has, else unchanged."""
        weight = self._norms.get(name)
        return rows if weight is None else F.rms_norm(rows, rows.shape[-1:], weight, eps=self.options.eps)


def _joined(weights: Mapping[str, Tensor], names: Sequence[str], like: Tensor) -> nn.Linear:
    """Linear layers with the same input as one."""
    parts = [weights[f"{name}.weight"] for name in names]
    biases = [weights.get(f"{name}.bias") for name in names]
    bias = None
    if any(part is not None for part in biases):
        pairs = zip(parts, biases, strict=True)
        bias = torch.cat([weight.new_zeros(len(weight)) if part is None else part for weight, part in pairs])
    return linear(torch.cat(parts), bias, like)
