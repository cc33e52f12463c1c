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
    DecoderLayer,
    Norm,
    compute_decoder_layers,
)
from specdec.backends.avx512.paged_attention import takes
from specdec.backends.avx512.tiled_linear import TiledLinear
from specdec.backends.base import Backend
from specdec.backends.layer_parts import linears_and_norms
from specdec.backends.observed_pass import AttentionSettings, ObservedPass, replace_modules

_MULTIPLE = 16  # of features, as in decoder_layer.c
_MIN_EQUAL_SHARE = 0.9
"""Share of the numbers that must have equal bits. Both sides round alike; only the sums in the norms differ. The lowest
share seen of a correct layer is 0.98."""


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
        if asked is None or observed.called is None or not takes(*observed.called):
            return
        if _fits(layer, asked) and _is_usual(asked, inputs, others, output):
            made, own = DecoderLayer(layer, asked), ObservedPass.over(model, backend)
            computed = made(*inputs, **(others | {"packed_pass": own}))
            pairs = zip(_seen(observed, asked), _seen(own, asked), strict=True)
            if all(agree(*pair) for pair in (*pairs, (output, computed))):
                fused[layer] = made
                runs.add(made, inputs[0], others["position_embeddings"], output)

    observed.run_watched(model, candidates, compare)
    replace_modules(model, fused, fused.__getitem__)
    runs.compute_together()


def agree(expected: Tensor, computed: Tensor) -> bool:
    """Whether the results of a model's own code and of this backend are of the same computation."""
    return float((expected == computed).float().mean()) >= _MIN_EQUAL_SHARE


def _seen(observed: ObservedPass, asked: AttentionSettings) -> tuple[Tensor, ...]:
    """The last layer's queries, and the keys and values in the pool of the pass."""
    queries: list[Tensor] = [work.query for work in observed.shared.values()] or list(observed.called or ())
    return queries[0], *observed.stored(asked)


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
    if (parts := linears_and_norms(layer)) is None:
        return False
    return (
        all(type(linear) is TiledLinear and linear.out_features % _MULTIPLE == 0 for linear in parts[0])
        and all(map(Norm.takes, parts[1]))
        and is_silu(layer.mlp.act_fn)
    )


def is_silu(activation: Any) -> bool:
    """Whether ``activation`` is SiLU far from 0 too: a comparison of layers may only reach inputs near 0."""
    numbers = torch.linspace(-30, 30, 1201, dtype=torch.bfloat16)
    return torch.equal(activation(numbers), torch.nn.functional.silu(numbers))


def _fits(layer: Any, asked: AttentionSettings) -> bool:
    """Whether all sizes agree with those of the attention."""
    parts = linears_and_norms(layer)
    assert parts is not None, "it is a candidate"
    linears, norms = parts
    hidden, features = linears[0].in_features, layer.mlp.gate_proj.out_features
    of_queries, of_keys = (heads * asked.head_dim for heads in (asked.heads, asked.kv_heads))
    shapes = [(linear.in_features, linear.out_features) for linear in linears]
    to_heads, to_features = [(hidden, size) for size in (of_queries, of_keys, of_keys)], [(hidden, features)] * 2
    of_norms = [hidden] * 2 + [asked.head_dim] * (len(norms) - 2)
    return shapes == [*to_heads, (of_queries, hidden), *to_features, (features, hidden)] and of_norms == [
        norm.weight.numel() for norm in norms
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
