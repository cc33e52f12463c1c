"""The interface of a backend, which computes the passes of one loaded model with its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.backends.packed_pass import Attention, PackedPass
from specdec.backends.taps import Taps
from specdec.core.sequence import Draw
from specdec.passes.outputs import PassOutputs
from specdec.passes.rows import PassRows

BYTES_PER_LOGIT = 6 * 8
"""Memory per logit of one draw or verification call: the float64 distributions of target and draft, and temporaries."""

COPIES = 2
"""Chunk limit: slots gathered for one attention call, per slot of the pool. A shared block is gathered once for each
sequence and each path of a tree, so without a limit a whole pass could need any multiple of the pool."""


class ModelCall(Protocol):
    """Runs a pass of one model."""

    decodes_further: bool
    """Whether it can decode further rows in a pass: see specdec.passes.rows.Segment."""

    def __call__(
        self,
        token_ids: Sequence[int],  # of each row
        positions: Sequence[int],
        logit_rows: Sequence[int],
        packed_pass: PackedPass,
    ) -> PassOutputs: ...

    def tap(self, boundaries: Sequence[int]) -> Taps:
        """Taps at these boundaries, one set at a time: ``remove`` earlier ones. Raises ValueError if there is no such
        boundary."""

    def request_yield(self, requested: bool) -> None:
        """Yield request: while ``requested``, compute no further rows, not even in the running pass. Thread-safe."""


class Backend(Protocol):
    """The computation of one model's passes on one device."""

    name: str
    """The value of ``--backend``."""

    fingerprint: str
    """All properties of this backend that affect the bits of a result: kernels, their version, the device. It is part
    of the model digest, so that replicas with equal digests give equal output."""

    device: torch.device

    logits_per_call: int
    """Chunk limit: rows times vocabulary of one draw or verification call."""

    def take(self, model: PreTrainedModel, vocab_size: int, context_length: int) -> ModelCall:
        """Take over the weights of ``model``, in place, and return the function that runs its passes.

        Columns of the head from ``vocab_size`` on are padding. Positions are below ``context_length``.
        """

    def pack(self, module: torch.nn.Module) -> None:
        """Prepare a module next to the model, in place: its linear layers, and each SideLayer in it."""

    def attention(self, rows: PassRows, block_size: int) -> Attention:
        """The attention of one pass, for all its layers."""

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor:  # [rows, vocab] -> [rows] int64
        """Greedy and coupled sampling: the token that each draw selects from its row."""

    def leaders(
        self, logits: Tensor, draws: Sequence[Draw], count: int, ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The tokens that a similar model most likely draws from each row [rows, vocab], most likely first, and their
        scores: [rows, count] int64 and float64. See specdec.sampling.distributions.most_likely_draws. ``ids`` [vocab]:
        the tokens of logits that are a part of the vocabulary; of those only the most likely ones need to be ranked."""

    def report(self, model: PreTrainedModel) -> dict[str, int]:
        """Number of modules of a taken model by the kernel that computes them, for the log."""
