"""A pass computed by the model's own code in transformers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.backends.packed_pass import PackedPass
from specdec.backends.taps import Taps, tapped_layers
from specdec.backends.torch.onednn_linear import min_rows, row_multiple
from specdec.core.device import indices
from specdec.passes.outputs import PassOutputs
from specdec.passes.rows import rounded


class ModelCode:
    """See specdec.backends.base.ModelCall."""

    decodes_further = False

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        self._model, self._device = model, model.device
        self._vocab_size = vocab_size
        self._row_multiple, self._min_rows = row_multiple(model), min_rows(model)
        self._features: Tensor | None = None
        head: torch.nn.Module = model.get_output_embeddings()  # type: ignore[no-untyped-call]
        head.register_forward_pre_hook(self._remember_features)

    def request_yield(self, requested: bool) -> None:
        pass  # this call computes no further rows

    def __call__(
        self, token_ids: Sequence[int], positions: Sequence[int], logit_rows: Sequence[int], packed_pass: PackedPass
    ) -> PassOutputs:
        padding = [0] * self._padding(len(token_ids))
        # A pass without logit rows (prefill) also computes some.
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
            # Some models exclude tokens by -inf, but never all tokens; every other defect shows in the largest logit.
            sound[self._tensor(logit_rows)] &= logits.amax(-1).isfinite()
        return PassOutputs(logits, features[0, : len(logit_rows)], sound)

    def tap(self, boundaries: Sequence[int]) -> Taps:
        return tapped_layers(self._model, boundaries)

    def _remember_features(self, _: Any, inputs: tuple[Tensor]) -> None:
        self._features = inputs[0]

    def _padding(self, num_rows: int) -> int:
        """The number of padding rows to add to ``num_rows``."""
        return rounded(max(num_rows, self._min_rows), self._row_multiple) - num_rows

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return indices(values, self._device)
