"""How a pass calls a model: by the model's own code, or straight from its embedding through its layers to its head.

Around layers that are computed in one call a model's own code has little left to do, and takes longer for it than they
take in a small model. Knows a model's modules; refuses to know architectures: a model is called straight if that gave
the same bits as its own code in a pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.decoder_layer import DecoderLayer
from specdec.observed_pass import ObservedPass
from specdec.packed_attention import PackedPass


class ModelCall(Protocol):
    def __call__(
        self,
        token_ids: Tensor,  # [rows]
        positions: Tensor,  # [rows]
        logit_rows: Tensor,  # [any]: indices of rows
        packed_pass: PackedPass,
    ) -> tuple[Tensor, Tensor]:
        """The logits of ``logit_rows`` [any, vocab_size], and what the output embedding read [any, hidden_size]."""


def call_of(model: PreTrainedModel) -> ModelCall:
    """The quickest that is right."""
    own = OwnCode(model)
    straight = _straight(model, own)
    if straight is None:
        return own
    own.close()
    return straight


class OwnCode:
    """See ModelCall."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._features: Tensor | None = None
        head: torch.nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._hook = head.register_forward_pre_hook(self._remember_features)

    def close(self) -> None:
        """It is not called any more."""
        self._hook.remove()

    def __call__(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, packed_pass: PackedPass
    ) -> tuple[Tensor, Tensor]:
        output = self._model(
            input_ids=token_ids[None],
            position_ids=positions[None],
            use_cache=False,
            logits_to_keep=logit_rows,
            packed_pass=packed_pass,
        )
        features, self._features = self._features, None
        assert features is not None, "the output embedding is part of the pass"
        return output.logits[0], features[0]

    def _remember_features(self, _: Any, inputs: tuple[Tensor]) -> None:
        self._features = inputs[0]


@dataclass(frozen=True)
class Straight:
    """See ModelCall. Of a model whose layers are all computed in one call."""

    embedding: torch.nn.Module
    rotary: torch.nn.Module
    layers: DecoderLayer
    norm: torch.nn.Module
    head: torch.nn.Module

    def __call__(
        self, token_ids: Tensor, positions: Tensor, logit_rows: Tensor, packed_pass: PackedPass
    ) -> tuple[Tensor, Tensor]:
        rows = self.embedding(token_ids[None])
        angles = self.rotary(rows, position_ids=positions[None])
        rows = self.layers(rows, position_embeddings=angles, packed_pass=packed_pass)
        features = self.norm(rows[0].index_select(0, logit_rows))
        return self.head(features), features


class _Seen(NamedTuple):
    """A call of a module."""

    module: torch.nn.Module
    inputs: tuple[Any, ...]
    others: dict[str, Any]
    output: Any


@torch.inference_mode()
def _straight(model: PreTrainedModel, own: OwnCode) -> Straight | None:
    if not any(isinstance(module, DecoderLayer) and module.num_led > 0 for module in model.modules()):
        return None
    calls: list[_Seen] = []
    hooks = [
        module.register_forward_hook(lambda *call: calls.append(_Seen(*call)), with_kwargs=True)
        for module in model.modules()
    ]
    observed = ObservedPass.over(model)
    try:
        logits, features = own(*observed.inputs, observed)
    finally:
        for hook in hooks:
            hook.remove()
    found = _parts(model, calls)
    if found is None:
        return None
    again = ObservedPass.over(model)
    same = all(map(torch.equal, found(*again.inputs, again), (logits, features)))
    return found if same else None


def _parts(model: PreTrainedModel, calls: list[_Seen]) -> Straight | None:
    """Found by what each was fed with."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[no-untyped-call]
    layers = [call for call in calls if isinstance(call.module, DecoderLayer)]
    first, last = layers[0], layers[-1]
    angles = first.others["position_embeddings"]
    rotary = [call for call in calls if call.output is angles]
    norm = [call for call in calls if call.inputs and call.inputs[0] is last.output and call not in layers]
    if not isinstance(first.module, DecoderLayer) or first.module.num_led != len(layers):
        return None
    if len(rotary) != 1 or len(rotary[0].inputs) + len(rotary[0].others) != 2 or len(norm) != 1:
        return None
    return Straight(embedding, rotary[0].module, first.module, norm[0].module, head)
