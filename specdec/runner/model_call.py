"""How a pass calls a model: by the model's own code, or by one function in C from its embedding to its head.

Around layers that are computed in one call a model's own code has little left to do, and takes longer for it than they
take in a small model. Knows a model's modules; refuses to know architectures: a model is called without its own code if
that gave what its own code gives in a pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.backends.avx512.decoder_layer import DecoderLayer, Norm
from specdec.backends.avx512.decoder_pass import DecoderPass
from specdec.backends.avx512.observed_pass import ObservedPass, agree
from specdec.backends.avx512.tiled_linear import TiledLinear
from specdec.backends.packed_pass import PackedPass
from specdec.backends.torch.onednn_linear import least_rows, row_multiple
from specdec.passes.outputs import PassOutputs
from specdec.passes.rows import rounded


class ModelCall(Protocol):
    goes_on: bool
    """After the rows of a pass there may be further ones: see specdec.passes.rows.Segment."""

    def __call__(
        self,
        token_ids: Sequence[int],  # of each row
        positions: Sequence[int],
        logit_rows: Sequence[int],
        packed_pass: PackedPass,
    ) -> PassOutputs: ...

    def hurry(self, hurried: bool) -> None:
        """Until it is told otherwise no further row is welcome any more, also in the pass at hand. From any thread."""


def call_of(model: PreTrainedModel, vocab_size: int, context_length: int) -> ModelCall:
    """The quickest that is right, for positions below ``context_length``. A head may have more than ``vocab_size``
    columns: what is in those after them is nobody's token."""
    own = OwnCode(model, vocab_size)
    found = _in_one_call(model, own, vocab_size, context_length)
    if found is None:
        return own
    own.close()
    return found


class OwnCode:
    """See ModelCall."""

    goes_on = False

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        self._model, self._device = model, model.device
        self._vocab_size = vocab_size
        self._row_multiple, self._least_rows = row_multiple(model), least_rows(model)
        self._features: Tensor | None = None
        head: torch.nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        self._hook = head.register_forward_pre_hook(self._remember_features)

    def close(self) -> None:
        """It is not called any more."""
        self._hook.remove()

    def hurry(self, hurried: bool) -> None:
        pass  # there are no such rows

    def __call__(
        self, token_ids: Sequence[int], positions: Sequence[int], logit_rows: Sequence[int], packed_pass: PackedPass
    ) -> PassOutputs:
        padding = [0] * self._padding(len(token_ids))
        # Also a pass that wants no logits (taking in a prompt) reads some.
        logits_to_keep = [*logit_rows, *[logit_rows[-1] if logit_rows else 0] * self._padding(len(logit_rows))]
        output = self._model(
            input_ids=self._tensor([*token_ids, *padding])[None],
            position_ids=self._tensor([*positions, *padding])[None],
            use_cache=False,
            logits_to_keep=self._tensor(logits_to_keep),
            packed_pass=packed_pass,
        )
        features, self._features = self._features, None
        assert features is not None, "the output embedding is part of the pass"
        logits, sound = output.logits[0, : len(logit_rows), : self._vocab_size], packed_pass.sound()
        if logit_rows:
            # Some models rule a token out by -inf; it is never all of them, and anything else shows in the largest.
            sound[self._tensor(logit_rows)] &= logits.amax(-1).isfinite()
        return PassOutputs(logits, features[0, : len(logit_rows)], sound)

    def _remember_features(self, _: Any, inputs: tuple[Tensor]) -> None:
        self._features = inputs[0]

    def _padding(self, num_rows: int) -> int:
        """Rows to add for as many as there must be."""
        return rounded(max(num_rows, self._least_rows), self._row_multiple) - num_rows

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


class _Seen(NamedTuple):
    """A call of a module."""

    module: torch.nn.Module
    inputs: tuple[Any, ...]
    others: dict[str, Any]
    output: Any


@torch.inference_mode()
def _in_one_call(model: PreTrainedModel, own: OwnCode, vocab_size: int, context_length: int) -> DecoderPass | None:
    if not any(isinstance(module, DecoderLayer) and module.num_led > 0 for module in model.modules()):
        return None
    calls: list[_Seen] = []
    hooks = [
        module.register_forward_hook(lambda *call: calls.append(_Seen(*call)), with_kwargs=True)
        for module in model.modules()
    ]
    observed = ObservedPass.near(model)
    try:
        expected = own(*observed.inputs, observed)
    finally:
        for hook in hooks:
            hook.remove()
    found = _parts(model, calls, vocab_size, context_length)
    # What the head reads is rounded alike and summed differently; what it makes of that has the same bits.
    if found is None or not torch.equal(found.head(expected.features)[:, :vocab_size], expected.logits):
        return None
    again = ObservedPass.near(model)
    return found if agree(expected.features, found(*again.inputs, again).features) else None


def _parts(model: PreTrainedModel, calls: list[_Seen], vocab_size: int, context_length: int) -> DecoderPass | None:
    """Found by what each was fed with."""
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
