"""The tensors of the KV pool, by slots (specdec.kvcache.block_pool)."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from specdec.core.device import indices
from specdec.kvcache.block_pool import BlockPool, Move

_Described = TypeVar("_Described")


class KvStore:
    """Keys and values of every layer, [num_blocks, block_size, kv_heads, head_dim] each."""

    def __init__(self, pool: BlockPool, device: torch.device) -> None:
        self._shape = (pool.num_blocks, pool.block_size)
        self.device, self.block_size = device, pool.block_size
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._described: dict[Hashable, Any] = {}

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The whole tensors of a layer, for keys and values with the shape of these [any, kv_heads, head_dim]."""
        if layer not in self._layers:  # allocated in the first pass, when the shape is known
            self._layers[layer] = (self._zeros(key), self._zeros(value))
        return self._layers[layer]

    def described(self, by: Hashable, describe: Callable[[KvStore], _Described]) -> _Described:
        """The result of ``describe(self)``, which is called once for each key ``by``."""
        if by not in self._described:
            self._described[by] = describe(self)
        description: _Described = self._described[by]
        return description

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Write key and value [rows, kv_heads, head_dim] into slots [rows].

        NaN and infinite values become 0. Attention multiplies masked slots by 0 instead of skipping them, so a NaN in a
        slot would reach other rows, and later sequences that reuse the slot.
        """
        keys, values = self.layer(layer, key, value)
        keys.flatten(0, 1).index_copy_(0, slots, key.nan_to_num(0.0, 0.0, 0.0))
        values.flatten(0, 1).index_copy_(0, slots, value.nan_to_num(0.0, 0.0, 0.0))

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot over all layers allocated so far."""
        return sum(tensor[0, 0].nbytes for tensors in self._layers.values() for tensor in tensors)

    @torch.inference_mode()
    def resized(self, pool: BlockPool) -> KvStore:
        """An empty store for ``pool``, with memory for all layers of this store."""
        store = KvStore(pool, self.device)
        for layer, (keys, values) in self._layers.items():
            store._layers[layer] = (store._zeros(keys[0]), store._zeros(values[0]))
        return store

    def _zeros(self, like: Tensor) -> Tensor:
        """[num_blocks, block_size, kv_heads, head_dim] for ``like`` [any, kv_heads, head_dim].

        Zeros, because memory that was never written could contain NaN, which passes through the mask.
        """
        shape = (*self._shape, *like.shape[1:])
        if self.device.type != "cpu":
            return like.new_zeros(shape)
        # numpy gets zero pages from the operating system at first use: the pool is allocated in no time and takes only
        # the memory that it uses. torch would write the zeros.
        num_bytes = math.prod(shape) * like.element_size()
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(like.dtype).view(shape)

    @torch.inference_mode()
    def move(self, moves: Sequence[Move]) -> None:
        """Apply all ``moves`` at once, reading before writing: the target of one may be the source of another."""
        if not moves:
            return
        sources, targets = indices(list(zip(*moves, strict=True)), self.device)  # [moves] each
        for tensors in self._layers.values():
            for tensor in tensors:
                slots = tensor.flatten(0, 1)
                slots.index_copy_(0, targets, slots.index_select(0, sources))
