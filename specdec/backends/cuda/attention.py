"""Attention over the description of a pass: by Triton's kernels on a GPU, by torch on a CPU, which is their reference.

A key or value is stored before any row is computed. Every chain is a text of its own, so only later keys, and keys
before the window, are masked.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.backends.cuda.launches import attend_by_kernels, store_by_kernel
from specdec.backends.cuda.memory import PassMemory
from specdec.backends.cuda.plan import COUNT, KEYS, PADDING, START, TABLE, TAIL, TAIL_FROM, Plan
from specdec.kvcache.store import KvStore
from specdec.passes.rows import KeyCounts, PassRows, rounded

_KEY_COUNTS, _ROW_MULTIPLE = KeyCounts((64, 128, 256), 512), 4
"""Numbers of keys, and of query rows of a key head, with which torch's kernel for CPUs gives a row the same bits among
any others (bench/LOG.md, 2026-11-21)."""


class PlannedAttention:
    """The attention of one pass, for all its layers: see specdec.backends.packed_pass.Attention."""

    def __init__(
        self, device: torch.device, block_size: int, rows: PassRows | None = None, memory: PassMemory | None = None
    ) -> None:
        """Of ``memory``, or of ``rows``, which are then described when it is needed."""
        self.device, self.block_size = device, block_size
        self._rows, self._given = rows, memory

    @functools.cached_property
    def plan(self) -> Plan:
        assert self._rows is not None, "memory has its plan"
        return Plan.of(self._rows, self.block_size)

    @functools.cached_property
    def _memory(self) -> PassMemory:
        if self._given is not None:
            return self._given
        memory = PassMemory(self.plan.shape(), self.device, self.block_size)
        memory.load(self.plan)
        return memory

    def attend(
        self,
        store: KvStore,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        output: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> None:
        """See specdec.backends.packed_pass.Attention. Rows that see nothing get 0."""
        memory, pool = self._memory, store.layer(layer, key, value)
        if self.device.type != "cpu":
            store_by_kernel(memory, pool, key, value)
            attend_by_kernels(memory, pool, query, output, scale=scale, window=window, softcap=softcap)
            return
        sources, slots = self._stored
        store.write(layer, slots, key[sources], value[sources])
        keys, values = (part.flatten(0, 1) for part in pool)
        output[: memory.shape.rows] = 0
        for tile in self._tiles:
            attended = tile.attended(query, keys[tile.slots], values[tile.slots], _Settings(scale, window, softcap))
            output.index_copy_(0, tile.rows, attended)

    @functools.cached_property
    def _stored(self) -> tuple[Tensor, Tensor]:
        """The rows that are stored, and their slots."""
        slots = self._memory.here["slots"]
        rows = (slots != PADDING).nonzero()[0]
        return torch.from_numpy(rows), torch.from_numpy(slots[rows].astype(np.int64))

    @functools.cached_property
    def _tiles(self) -> list[_Tile]:
        here, size = self._memory.here, self.block_size
        tiles = []
        for chain in here["chains"].tolist():
            if not chain[COUNT] or not chain[KEYS]:
                continue
            places = np.arange(chain[KEYS])
            tail_from = min(chain[TAIL_FROM], chain[KEYS])
            slots = here["blocks"][chain[TABLE] + places[:tail_from] // size] * size + places[:tail_from] % size
            slots = np.concatenate([slots, here["blocks"][chain[TAIL] :][: chain[KEYS] - tail_from]]).astype(np.int64)
            rows = here["chain_rows"][chain[START] :][: chain[COUNT]].astype(np.int64)
            positions = places[chain[KEYS] - chain[COUNT] :]
            levels = np.array(list(map(_KEY_COUNTS.level, positions.tolist())))
            for level in sorted(set(levels.tolist())):
                alike = levels == level
                num_keys = _KEY_COUNTS.at_least(level, int(positions[alike][-1]) + 1)
                padded = np.pad(slots[:num_keys], (0, max(0, num_keys - len(slots))))
                tiles.append(_Tile(*map(torch.from_numpy, (rows[alike], padded, positions[alike]))))
        return tiles


class _Settings(NamedTuple):
    scale: float
    window: int | None
    softcap: float | None


class _Tile(NamedTuple):
    """Rows of a chain that share a call of torch's attention."""

    rows: Tensor  # [rows] of the pass
    slots: Tensor  # [keys], with padding
    positions: Tensor  # [rows]

    def attended(self, query: Tensor, keys: Tensor, values: Tensor, settings: _Settings) -> Tensor:
        """``query``: of the pass; keys and values [keys, kv_heads, head_dim]. Returns [rows, heads, head_dim]."""
        heads, kv_heads, num = query.shape[1], keys.shape[1], len(self.rows)
        groups, softcap = heads // kv_heads, settings.softcap
        num_rows = rounded(num, _ROW_MULTIPLE // math.gcd(groups, _ROW_MULTIPLE))
        rows, positions = (torch.cat([part, part[:1].expand(num_rows - num)]) for part in (self.rows, self.positions))
        distance = positions[:, None] - torch.arange(len(self.slots))
        hidden = (distance < 0) | (distance >= (settings.window or len(self.slots)))
        mask = torch.zeros(hidden.shape, dtype=query.dtype).masked_fill_(hidden, -torch.inf)
        mask = mask.repeat_interleave(groups, 0)
        # The query heads of a key head become rows of one head.
        grouped = query[rows].view(num_rows, kv_heads, groups, -1).transpose(0, 1).reshape(1, kv_heads, len(mask), -1)
        key, value = (part.transpose(0, 1)[None] for part in (keys, values))
        if softcap is None:
            attend = torch.nn.functional.scaled_dot_product_attention
            attended = attend(grouped, key, value, attn_mask=mask, scale=settings.scale)
        else:
            scores = torch.tanh((grouped @ key.transpose(2, 3)).float() * settings.scale / softcap) * softcap + mask
            attended = scores.softmax(-1).to(query.dtype) @ value
        by_row = attended.view(kv_heads, num_rows, groups, -1).transpose(0, 1).reshape(num_rows, heads, -1)
        return by_row[:num]
