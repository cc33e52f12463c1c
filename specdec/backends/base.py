"""The seam: what computes a pass, whichever kernels it uses. A backend has four verbs and belongs to one loaded model.

Knows packed rows and logits; refuses to know sequences, streams and who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.backends.packed_pass import Attention, PackedPass
from specdec.core.sequence import Draw
from specdec.passes.outputs import PassOutputs
from specdec.passes.rows import PassRows

BYTES_PER_LOGIT = 6 * 8
"""Of those that are drawn from or verified at once: distributions of target and draft in float64, and what it takes to
find them."""

COPIES = 2
"""Slots that the keys and values gathered for a call take at most, per slot of the pool. Sequences that share blocks,
and the paths of a tree, read them each for itself, so that all those of a pass may be any multiple of the pool."""


class ModelCall(Protocol):
    """Runs a pass of one model."""

    goes_on: bool
    """After the rows of a pass there may be further ones: see specdec.passes.rows.Segment."""

    def __call__(
        self,
        token_ids: Sequence[int],  # of each row
        positions: Sequence[int],
        logit_rows: Sequence[int],
        packed_pass: PackedPass,
    ) -> PassOutputs: ...

    def request_yield(self, requested: bool) -> None:
        """While ``requested``, no further row is computed, not even in the pass at hand. May be called from any
        thread."""


class Backend(Protocol):
    """How one model's passes are computed on one device."""

    name: str
    """As in ``--backend``."""

    fingerprint: str
    """Everything about this backend that decides the bits of a result: kernels, their version, the device. It is part
    of the model digest, so that replicas with equal digests give equal output."""

    device: torch.device

    logits_per_call: int
    """Rows times vocabulary that are drawn from, or verified, in one call."""

    def take(self, model: PreTrainedModel, vocab_size: int, context_length: int) -> ModelCall:
        """Take over the weights of ``model``, in place, and return how its passes are run.

        A head may have more than ``vocab_size`` columns: those after them are padding. Positions are below
        ``context_length``.
        """

    def attention(self, rows: PassRows, block_size: int) -> Attention:
        """Attention of one pass, for all its layers."""

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:  # [rows, vocab] -> [rows] int64
        """Greedy and coupled sampling: the token that each draw picks from its row."""

    def leaders(self, logits: Tensor, draws: Sequence[Draw], count: int) -> tuple[Tensor, Tensor]:
        """The tokens likeliest to be drawn from each row [rows, vocab] by a model near this one, likeliest first, and
        their scores: [rows, count] int64 and float64. See specdec.sampling.distributions.runners_up."""

    def report(self, model: PreTrainedModel) -> dict[str, int]:
        """Which parts of a model that it took are computed by which kernels, for the log."""
