"""The choice of models that one C function computes from the embedding to the head (``decoder_pass``).

In a small model the little Python code around the fused layers takes longer than the layers themselves. Knows a
model's modules; does not know architectures. The C function replaces a model's own code if both give the same results
in a test pass.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.backends.avx512.decoder_layer import DecoderLayer, Norm
from specdec.backends.avx512.decoder_pass import DecoderPass
from specdec.backends.avx512.fused_layers import agree
from specdec.backends.avx512.tiled_linear import TiledLinear
from specdec.backends.base import Backend, ModelCall
from specdec.backends.observed_pass import ObservedPass


class _Seen(NamedTuple):
    """A call of a module."""

    module: torch.nn.Module
    inputs: tuple[Any, ...]
    others: dict[str, Any]
    output: Any


@torch.inference_mode()
def in_one_call(
    model: PreTrainedModel, own: ModelCall, backend: Backend, vocab_size: int, context_length: int
) -> DecoderPass | None:
    """The one-call pass of ``model``; None: the model needs its ``own`` code."""
    if not any(isinstance(module, DecoderLayer) and module.num_led > 0 for module in model.modules()):
        return None
    calls: list[_Seen] = []
    hooks = [
        module.register_forward_hook(lambda *call: calls.append(_Seen(*call)), with_kwargs=True)
        for module in model.modules()
    ]
    observed = ObservedPass.near(model, backend)
    try:
        expected = own(*observed.inputs, observed)
    finally:
        for hook in hooks:
            hook.remove()
    found = _parts(model, calls, vocab_size, context_length)
    # The inputs of the head differ in summation order only; for equal inputs its outputs have equal bits.
    if found is None or not torch.equal(found.head(expected.features)[:, :vocab_size], expected.logits):
        return None
    again = ObservedPass.near(model, backend)
    return found if agree(expected.features, found(*again.inputs, again).features) else None


def _parts(model: PreTrainedModel, calls: list[_Seen], vocab_size: int, context_length: int) -> DecoderPass | None:
    """The parts of the model, found by the inputs and outputs of ``calls``; None if it has another form."""
    embedding: Any = model.get_input_embeddings()
    head: Any = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    layers = [call for call in calls if isinstance(call.module, DecoderLayer)]
    first, last = layers[0], layers[-1]
    angles = first.others["position_embeddings"]
    rotary = [call for call in calls if call.output is angles]
    norm = [call for call in calls if call.inputs and call.inputs[0] is last.output and call not in layers]
    if not isinstance(first.module, DecoderLayer) or first.module.num_led != len(layers):
        return None
    if len(rotary) != 1 or len(rotary[0].inputs) + len(rotary[0].others) != 2 or len(norm) != 1:
        return None
    if type(embedding).forward is not torch.nn.Embedding.forward or type(head) is not TiledLinear:
        return None
    if not Norm.takes(norm[0].module) or not _fit(embedding.weight, first.inputs[0]):
        return None
    of_norm: Any = norm[0].module.weight
    if not embedding.weight.shape[1] == len(of_norm) == head.in_features:
        return None
    if vocab_size > min(len(embedding.weight), head.out_features):
        return None
    return DecoderPass(embedding, rotary[0].module, first.module, norm[0].module, head, vocab_size, context_length)


def _fit(embeddings: Tensor, rows: Tensor) -> bool:
    is_usual = embeddings.dtype is torch.bfloat16 and embeddings.is_contiguous()
    return is_usual and embeddings.shape[1] == rows.shape[2]
