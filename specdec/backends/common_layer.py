"""Decoder layers of the common kind, with merged products: 16 kernels instead of the 41 of a model's own code.

Knows a model's modules; does not know architectures. A layer is replaced if it has the parts of the common kind, and
if its replacement gives the results of the layer's own code in a test pass of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.backends.base import Backend
from specdec.backends.layer_parts import NORMS, linears_and_norms
from specdec.backends.observed_pass import AttentionSettings, ObservedPass, replace_modules
from specdec.backends.packed_pass import PackedPass

_TOLERANCE = {torch.float32: 1e-5}
_TOLERANCE_OTHERWISE = 0.02
"""Root mean square error of a layer's results by that of the results. The order of roundings differs."""


class CommonLayer(torch.nn.Module):
    """Replaces ``layer``, of which it keeps the weights, q, k and v merged, and gate and up."""

    def __init__(self, layer: Any, settings: AttentionSettings) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.settings, self.sliding_window = settings, settings.window
        self.to_heads = _merged([attention.q_proj, attention.k_proj, attention.v_proj])
        self.to_features = _merged([mlp.gate_proj, mlp.up_proj])
        self.from_heads, self.from_features, self.activation = attention.o_proj, mlp.down_proj, mlp.act_fn
        self.input_norm, self.output_norm = (_fused(getattr(layer, name)) for name in NORMS[0])
        self.query_norm, self.key_norm = (_fused(getattr(attention, name, None)) for name in NORMS[1])

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: tuple[Tensor, Tensor], packed_pass: PackedPass, **_: Any
    ) -> Tensor:  # [1, rows, hidden_size]
        layer, heads, kv_heads, head_dim, scale, _window = self.settings
        rows = hidden_states[0]
        parts = self.to_heads(self.input_norm(rows)).view(len(rows), -1, head_dim)
        query, key, value = torch.split(parts, [heads, kv_heads, kv_heads], 1)
        cos, sin = _angles(position_embeddings, packed_pass)
        if isinstance(self.query_norm, torch.nn.Identity):
            query, key = torch.split(_rotated(parts[:, : heads + kv_heads], cos, sin), [heads, kv_heads], 1)
        else:
            query, key = _rotated(self.query_norm(query), cos, sin), _rotated(self.key_norm(key), cos, sin)
        attended = packed_pass.attend(
            layer, query, key, value=value, scale=scale, window=self.sliding_window, softcap=None
        )
        rows = rows + self.from_heads(attended.flatten(1))
        gate, up = self.to_features(self.output_norm(rows)).chunk(2, -1)
        outputs: Tensor = rows + self.from_features(self.activation(gate) * up)
        return outputs[None]


@torch.inference_mode()
def replace_layers(model: PreTrainedModel, backend: Backend) -> None:
    """Replace the decoder layers of ``model`` that are of the common kind, in place."""
    candidates = {child for child in model.modules() if _has_the_parts(child)}
    agreeing: dict[torch.nn.Module, AttentionSettings] = {}
    if not candidates:
        return
    observed = ObservedPass.over(model, backend)

    def compare(layer: torch.nn.Module, inputs: tuple[Any, ...], others: dict[str, Any], output: Any) -> None:
        settings, observed.asked = observed.asked, None
        angles = others.get("position_embeddings")
        if settings is None or len(inputs) != 1 or not isinstance(output, Tensor) or not isinstance(angles, tuple):
            return
        again = ObservedPass.over(model, backend)
        try:
            computed = CommonLayer(layer, settings)(*inputs, position_embeddings=angles, packed_pass=again)
        except (RuntimeError, ValueError):  # its sizes are not those of the common kind
            return
        if all(map(_agree, (output, *observed.stored(settings)), (computed, *again.stored(settings)))):
            agreeing[layer] = settings

    observed.run_watched(model, candidates, compare)
    replace_modules(model, agreeing, lambda layer: CommonLayer(layer, agreeing[layer]))  # merged weights are copies


def _has_the_parts(layer: torch.nn.Module) -> bool:
    linears, norms = linears_and_norms(layer) or ((), ())
    return (
        bool(linears)
        and all(type(linear) is torch.nn.Linear for linear in linears)
        and all(isinstance(getattr(norm, "weight", None), Tensor) for norm in norms)
        and all(hasattr(norm, "variance_epsilon") or isinstance(getattr(norm, "eps", None), float) for norm in norms)
    )


def _merged(linears: Sequence[torch.nn.Linear]) -> torch.nn.Linear:
    """Linear layers with the same input as one."""
    weights: list[Tensor] = [linear.weight for linear in linears]
    weight, has_bias = torch.cat(weights), any(linear.bias is not None for linear in linears)
    merged = torch.nn.Linear(weight.shape[1], len(weight), bias=has_bias, device="meta")
    merged.weight = torch.nn.Parameter(weight, requires_grad=False)
    if has_bias:
        biases: list[Tensor] = [
            weight.new_zeros(len(part.weight)) if part.bias is None else part.bias for part in linears
        ]
        merged.bias = torch.nn.Parameter(torch.cat(biases), requires_grad=False)
    return merged


def _fused(norm: Any) -> torch.nn.Module:
    """An RMS norm in one kernel; nothing for None."""
    if norm is None:
        return torch.nn.Identity()
    epsilon = getattr(norm, "variance_epsilon", None)
    fused = torch.nn.RMSNorm(len(norm.weight), float(norm.eps if epsilon is None else epsilon), device="meta")
    fused.weight = norm.weight
    return fused


def _angles(position_embeddings: tuple[Tensor, Tensor], packed_pass: PackedPass) -> tuple[Tensor, Tensor]:
    """Cosines and sines [rows, 1, head_dim] as ``_rotated`` takes them, computed once for the layers of a pass."""
    key = "angles", id(position_embeddings)
    if key not in packed_pass.shared:
        cos, sin = (part[0][:, None] for part in position_embeddings)
        first, second = sin.chunk(2, -1)
        packed_pass.shared[key] = cos, torch.cat([-first, second], -1), position_embeddings
    cos, sin, _ = packed_pass.shared[key]
    return cos, sin


def _rotated(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [rows, heads, head_dim]
    return torch.addcmul(heads * cos, heads.roll(heads.shape[-1] // 2, -1), sin)


def _agree(expected: Tensor, computed: Tensor) -> bool:
    """Whether the results of a model's own code and of this module are of the same computation."""
    if expected.shape != computed.shape:
        return False
    off = (expected.float() - computed.float()).square().mean().sqrt()
    tolerance = _TOLERANCE.get(expected.dtype, _TOLERANCE_OTHERWISE)
    return bool(off <= tolerance * expected.float().square().mean().sqrt())
