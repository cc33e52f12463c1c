"""A test pass of short texts, which records how a model calls its attention. Does not know architectures."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.backends.base import Backend
from specdec.backends.packed_pass import PackedPass
from specdec.kvcache.block_pool import BlockPool
from specdec.kvcache.store import KvStore
from specdec.passes.rows import PassRows, Segment

_TEXT_LENGTHS, _BLOCK_SIZE = (7, 3), 8


class AttentionSettings(NamedTuple):
    """The arguments with which a layer's own code calls its attention."""

    layer: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None


class Inputs(NamedTuple):
    """Inputs of the test pass, by row. Most rows are logit rows, but not all."""

    token_ids: list[int]
    positions: list[int]
    logit_rows: list[int]


class ObservedPass(PackedPass):
    """A pass that records the last call of its attention."""

    def __init__(self, vocab_size: int, max_position: int, backend: Backend) -> None:
        pools = KvStore(BlockPool(len(_TEXT_LENGTHS), _BLOCK_SIZE), backend.device)
        segments = [
            Segment(range(length), range(-1, length - 1), 0, [block], []) for block, length in enumerate(_TEXT_LENGTHS)
        ]
        rows = PassRows(segments, _BLOCK_SIZE)
        super().__init__(pools, rows, backend.attention(rows, _BLOCK_SIZE))
        # Positions over the model's whole range: some code treats distant positions in another way.
        stride = max(1, max_position // max(_TEXT_LENGTHS))
        num_rows = sum(_TEXT_LENGTHS)
        token_ids = [number % vocab_size for number in range(num_rows)]
        positions = [position * stride for position in self.rows.positions]
        self.inputs = Inputs(token_ids, positions, list(range(1, num_rows)))
        self.asked: AttentionSettings | None = None
        """None also if that call caps scores."""
        self.called: tuple[Tensor, Tensor, Tensor] | None = None
        """Its queries, keys and values."""

    @classmethod
    def over(cls, model: PreTrainedModel, backend: Backend) -> ObservedPass:
        config = model.config.get_text_config()
        return cls(config.vocab_size, getattr(config, "max_position_embeddings", None) or 0, backend)

    @classmethod
    def near(cls, model: PreTrainedModel, backend: Backend) -> ObservedPass:
        """A test pass with consecutive positions."""
        return cls(model.config.get_text_config().vocab_size, 0, backend)

    def run(self, model: PreTrainedModel) -> None:
        """Run the model's own code over the inputs."""
        ids, positions = (torch.tensor(numbers, device=self.store.device)[None] for numbers in self.inputs[:2])
        model(input_ids=ids, position_ids=positions, use_cache=False, packed_pass=self)

    def run_watched(
        self, model: PreTrainedModel, layers: Iterable[torch.nn.Module], watch: Callable[..., None]
    ) -> None:
        """The same; after each layer calls ``watch`` with it, its inputs, those by name, and its output."""
        hooks = [layer.register_forward_hook(watch, with_kwargs=True) for layer in layers]
        try:
            self.run(model)
        finally:
            for hook in hooks:
                hook.remove()

    def stored(self, of: AttentionSettings) -> tuple[Tensor, Tensor]:
        """The keys and values in its pool."""
        like = torch.empty(0, of.kv_heads, of.head_dim, device=self.store.device)
        return self.store.layer(of.layer, like, like)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        settings = AttentionSettings(layer, query.shape[1], key.shape[1], query.shape[2], scale, window)
        self.asked = settings if softcap is None and query.shape[2] == value.shape[2] else None
        self.called = query, key, value
        return super().attend(layer, query, key, value, scale, window, softcap)


def replace_modules(
    model: torch.nn.Module, among: Iterable[Any], replacement: Callable[[Any], torch.nn.Module]
) -> None:
    """Replace the modules of ``model`` that are ``among`` these, one at a time: what is replaced may be freed before
    the next one is made."""
    replaced = set(among)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child in replaced:
                setattr(parent, name, replacement(child))
