"""The tensors behind the KV pool; nothing of sequences. Slots are what specdec.kvcache.block_pool calls by that
name."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from specdec.kvcache.block_pool import BlockPool, Move

_Described = TypeVar("_Described")


class KvStore:
    """Keys and values of every layer, [num_blocks, block_size, kv_heads, head_dim] each."""

    def __init__(self, pool: BlockPool, device: torch.device) -> None:
        self._shape = (pool.num_blocks, pool.block_size)
        self.device = device
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._described: dict[Hashable, Any] = {}

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The whole tensors of a layer that has keys and values like these, [any, kv_heads, head_dim]."""
        if layer not in self._layers:  # made at the first pass, when the shape is known
            self._layers[layer] = (self._zeros(key), self._zeros(value))
        return self._layers[layer]

    def described(self, by: Hashable, describe: Callable[[KvStore], _Described]) -> _Described:
        """What ``describe`` says of this store, which is asked once."""
        if by not in self._described:
            self._described[by] = describe(self)
        found: _Described = self._described[by]
        return found

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put key and value [rows, kv_heads, head_dim] into slots [rows].

        What is no number there, or infinite, becomes 0: a slot that is hidden from a row is multiplied by 0, not left
        out, so that a NaN would reach whoever reads it along with its own, now or when the slot has gone to another.
        """
        keys, values = self.layer(layer, key, value)
        keys.flatten(0, 1).index_copy_(0, slots, key.nan_to_num(0.0, 0.0, 0.0))
        values.flatten(0, 1).index_copy_(0, slots, value.nan_to_num(0.0, 0.0, 0.0))

    @property
    def bytes_per_slot(self) -> int:
        """In the layers that a pass has come to."""
        return sum(tensor[0, 0].nbytes for tensors in self._layers.values() for tensor in tensors)

    @torch.inference_mode()
    def resized(self, pool: BlockPool) -> KvStore:
        """An empty store for ``pool``. Layers that this one has get their memory at once."""
        store = KvStore(pool, self.device)
        for layer, (keys, values) in self._layers.items():
            store._layers[layer] = (store._zeros(keys[0]), store._zeros(values[0]))
        return store

    def _zeros(self, like: Tensor) -> Tensor:
        """[num_blocks, block_size, kv_heads, head_dim] for ``like`` [any, kv_heads, head_dim].

        Zeros, not garbage: a slot that was never written must not bring NaN into a masked position.
        """
        shape = (*self._shape, *like.shape[1:])
        if self.device.type != "cpu":
            return like.new_zeros(shape)
        # numpy's come from the operating system, page by page when they are first touched, so that a pool takes
        # no time to make and no memory that it does not use; torch would write them.
        num_bytes = math.prod(shape) * like.element_size()
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(like.dtype).view(shape)

    @torch.inference_mode()
    def move(self, moves: Sequence[Move]) -> None:
        """All of ``moves`` at once: what one of them overwrites, another may read."""
        if not moves:
            return
        sources = torch.tensor([move.source for move in moves], device=self.device)
        targets = torch.tensor([move.target for move in moves], device=self.device)
        for tensors in self._layers.values():
            for tensor in tensors:
                slots = tensor.flatten(0, 1)
                slots.index_copy_(0, targets, slots.index_select(0, sources))
