"""Replacement of a model's decoder layers by ``specdec.backends.avx512.decoder_layer``.

Knows a model's modules; does not know architectures. A layer is replaced if it has the parts of the common kind, and
if its replacement gives the results of the layer's own code in a pass of the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.backends.avx512.decoder_layer import (
    LINEARS,
    NORMS,
    AttentionSettings,
    DecoderLayer,
    Norm,
    compute_decoder_layers,
)
from specdec.backends.avx512.observed_pass import ObservedPass, agree
from specdec.backends.avx512.tiled_linear import TiledLinear
from specdec.backends.base import Backend

_MULTIPLE = 16  # of features, as in decoder_layer.c


@torch.inference_mode()
def fuse_layers(model: PreTrainedModel, backend: Backend) -> None:
    """Replace decoder layers of ``model`` in place; its linear layers are TiledLinear already. Others do not change."""
    candidates = {child for child in model.modules() if _has_the_parts(child)}
    if compute_decoder_layers() is None or not candidates:
        return
    observed = ObservedPass.over(model, backend)
    fused: dict[torch.nn.Module, DecoderLayer] = {}
    runs = _Runs()

    def compare(layer: torch.nn.Module, inputs: tuple[Any, ...], others: dict[str, Any], output: Any) -> None:
        asked, observed.asked = observed.asked, None
        if asked is not None and _fits(layer, asked) and _is_usual(asked, inputs, others, output):
            made, own = DecoderLayer(layer, asked), ObservedPass.over(model, backend)
            computed = made(*inputs, **(others | {"packed_pass": own}))
            pairs = zip(observed.seen(asked), own.seen(asked), strict=True)
            if all(agree(*pair) for pair in (*pairs, (output, computed))):
                fused[layer] = made
                runs.add(made, inputs[0], others["position_embeddings"], output)

    hooks = [layer.register_forward_hook(compare, with_kwargs=True) for layer in candidates]
    try:
        token_ids, positions, _ = observed.inputs
        at, places = torch.tensor(token_ids)[None], torch.tensor(positions)[None]
        model(input_ids=at, position_ids=places, use_cache=False, packed_pass=observed)
    finally:
        for hook in hooks:
            hook.remove()
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in fused:
                setattr(parent, name, fused[child])
    runs.compute_together()


class _Runs:
    """Runs of layers: the output of each layer is the only input of the next, and the angles are shared."""

    def __init__(self) -> None:
        self._runs: list[list[DecoderLayer]] = []
        self._angles: object = None
        self._output: object = None

    def add(self, layer: DecoderLayer, rows: Tensor, angles: object, output: Tensor) -> None:
        if rows is self._output and angles is self._angles and layer.sizes == self._runs[-1][-1].sizes:
            self._runs[-1].append(layer)
        else:
            self._runs.append([layer])
        self._angles, self._output = angles, output

    def compute_together(self) -> None:
        for run in self._runs:
            run[0].lead(run)


def _has_the_parts(layer: Any) -> bool:
    parts = dict(layer.named_children())
    if set(parts) != {"self_attn", "mlp", *NORMS[0]}:
        return False
    of_attention, of_mlp = ({name for name, _ in parts[part].named_children()} for part in ("self_attn", "mlp"))
    return (
        set(LINEARS[0]) <= of_attention <= {*LINEARS[0], *NORMS[1]}
        and set(LINEARS[1]) | {"act_fn"} == of_mlp
        and all(type(linear) is TiledLinear and linear.out_features % _MULTIPLE == 0 for linear in _linears(layer))
        and all(Norm.takes(norm) for norm in _norms(layer))
        and is_silu(layer.mlp.act_fn)
    )


def _linears(layer: Any) -> list[Any]:
    parts = (layer.self_attn, layer.mlp)
    return [getattr(part, name) for part, names in zip(parts, LINEARS, strict=True) for name in names]


def _norms(layer: Any) -> list[Any]:
    of_heads = [getattr(layer.self_attn, name) for name in NORMS[1] if hasattr(layer.self_attn, name)]
    return [*(getattr(layer, name) for name in NORMS[0]), *of_heads]


def is_silu(activation: Any) -> bool:
    """Whether ``activation`` is SiLU far from 0 too: a comparison of layers may only reach inputs near 0."""
    numbers = torch.linspace(-30, 30, 1201, dtype=torch.bfloat16)
    return torch.equal(activation(numbers), torch.nn.functional.silu(numbers))


def _fits(layer: Any, asked: AttentionSettings) -> bool:
    """Whether all sizes agree with those of the attention."""
    attention, mlp = layer.self_attn, layer.mlp
    hidden = attention.q_proj.in_features
    of_queries, of_keys = (heads * asked.head_dim for heads in (asked.heads, asked.kv_heads))
    features = mlp.gate_proj.out_features
    shapes = [(linear.in_features, linear.out_features) for linear in _linears(layer)]
    to_heads, to_features = [(hidden, size) for size in (of_queries, of_keys, of_keys)], [(hidden, features)] * 2
    of_norms = [hidden] * 2 + [asked.head_dim for name in NORMS[1] if hasattr(attention, name)]
    return shapes == [*to_heads, (of_queries, hidden), *to_features, (features, hidden)] and of_norms == [
        norm.weight.numel() for norm in _norms(layer)
    ]


def _is_usual(asked: AttentionSettings, inputs: Sequence[Any], others: dict[str, Any], output: Any) -> bool:
    """Whether a layer has the inputs and outputs of ``DecoderLayer``."""
    angles = others.get("position_embeddings")
    if len(inputs) != 1 or not isinstance(output, Tensor) or not isinstance(angles, tuple) or len(angles) != 2:
        return False
    shape = (1, inputs[0].shape[1], asked.head_dim)
    return all(tensor.dtype is torch.bfloat16 and tensor.is_contiguous() for tensor in (*inputs, *angles)) and all(
        tensor.shape == shape for tensor in angles
    )
