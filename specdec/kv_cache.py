"""A pool of KV slots and, per sequence, which slot holds which position; nothing of models or attention.

One slot holds the keys and values of one token in every layer. Because a sequence is only a list of slots,
rolling back, or keeping one path of a verified tree, moves no tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


class PoolFullError(Exception):
    """Not enough free slots. Nothing was taken."""


class KvPool:
    """``num_slots`` token slots. The tensors of a layer are made at its first write, when their shape is known."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self.num_slots = num_slots
        self._device = device
        self._free = list(range(num_slots - 1, -1, -1))
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def num_used(self) -> int:
        return self.num_slots - len(self._free)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise PoolFullError(f"{count} KV slots needed, {len(self._free)} of {self.num_slots} free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, slots: Iterable[int]) -> None:
        self._free.extend(slots)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store key and value [rows, kv_heads, head_dim] in slots [rows].

        Returns the layer's whole key and value pool [num_slots, kv_heads, head_dim].
        """
        if layer not in self._layers:
            # Zeros, not garbage: a slot that was never written must not bring NaN into a masked position.
            self._layers[layer] = (
                key.new_zeros((self.num_slots, *key.shape[1:])),
                value.new_zeros((self.num_slots, *value.shape[1:])),
            )
        keys, values = self._layers[layer]
        keys.index_copy_(0, slots, key)
        values.index_copy_(0, slots, value)
        return keys, values


class SequenceCache:
    """The KV of one sequence: ``slots[i]`` holds position i."""

    def __init__(self, pool: KvPool) -> None:
        self._pool = pool
        self.slots: list[int] = []
        self._fed: list[int] = []  # taken for a pass and not yet decided about

    def __len__(self) -> int:
        return len(self.slots)

    def take(self, num_rows: int) -> list[int]:
        """Slots for rows about to be fed. ``keep`` decides about them once the pass is done."""
        self._fed = self._pool.take(num_rows)
        return self._fed

    def keep(self, rows: Sequence[int]) -> None:
        """Of the rows last fed, these continue the sequence; the slots of the others go back to the pool."""
        kept = set(rows)
        self.slots.extend(self._fed[row] for row in rows)
        self._pool.give_back(slot for row, slot in enumerate(self._fed) if row not in kept)
        self._fed = []

    def truncate(self, length: int) -> None:
        """Forget every position from ``length`` on."""
        self._pool.give_back(self.slots[length:])
        del self.slots[length:]

    def release(self) -> None:
        """Give back everything, also what a failed pass had taken."""
        self.keep(())
        self.truncate(0)
