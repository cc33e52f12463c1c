"""Attention of packed rows over keys and values that are gathered from the pool, by torch's kernels, on any device.

Segments with similar numbers of rows and keys share a call. The
bits of a row must not depend on the other rows, the tree below it or the chunks of its prompt. For that, the kernel of
``scaled_dot_product_attention`` needs two things (bench/LOG.md, 2026-11-21): query rows per key head in multiples of
four, and the number of keys that ``KeyCounts`` gives for the rows' positions.
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from specdec.backends.base import COPIES
from specdec.core.device import indices, sent
from specdec.kvcache.store import KvStore
from specdec.passes.rows import KeyCounts, Member, PassRows, rounded

ROW_MULTIPLE = 4
KEY_COUNTS = KeyCounts((64, 128, 256), 512)
_SMALL_ROWS, _SMALL_KEYS = 16, 256
"""Members up to these sizes share a call."""


class Scratch:
    """A buffer that all calls of a pass reuse, the largest call first. New memory of that size comes page by page from
    the operating system, which takes ten times as long as the copy."""

    def __init__(self) -> None:
        self.kept: Tensor | None = None

    def take(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        size = math.prod(shape)
        if self.kept is None or self.kept.numel() < size:
            self.kept = None  # frees the old buffer before the new one exists
            self.kept = like.new_empty(size)
        return self.kept[:size].view(shape)


@dataclass(slots=True)
class _Bucket:
    """Members that share an attention call: S members of up to R rows over up to N keys."""

    pages: Tensor  # by_block: [S * N / block_size] blocks of the keys; else [S * N] slots of the keys
    by_block: bool
    queries: Tensor  # [S * R]: the pass row of each query; for padding, any row
    query_of_row: Tensor | None  # [rows]: the index of each row among the queries; None: there is no padding
    rows: Tensor  # [rows]: the pass row of each row
    visible: Tensor  # [S, R, N] bool
    query_positions: Tensor  # [S, R]
    key_positions: Tensor  # [S or 1, N]
    masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def num_gathered(self) -> int:
        num_members, _, num_keys = self.visible.shape
        return num_members * num_keys

    def gathered(self, layer: Tensor, scratch: Scratch) -> Tensor:
        """The keys or values of each member, [S, kv_heads, N, head_dim].

        ``layer``: all of a layer's, [num_blocks, block_size, kv_heads, head_dim]. By blocks it takes a fifth less time
        than by slots.
        """
        source = layer if self.by_block else layer.flatten(0, 1)
        out = scratch.take((len(self.pages), *source.shape[1:]), layer)
        rows = torch.index_select(source, 0, self.pages, out=out)
        return rows.view(len(self.visible), -1, *layer.shape[2:]).transpose(1, 2)

    def mask(self, window: int | None, dtype: torch.dtype, groups: int) -> Tensor:
        """The mask to add to the scores, 0 or -inf: [S, 1, R * groups, N]."""
        if (window, dtype) not in self.masks:
            visible = self.visible
            if window is not None:
                visible = visible & (self.query_positions[:, :, None] - self.key_positions[:, None, :] < window)
            hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
            self.masks[window, dtype] = hidden.repeat_interleave(groups, dim=1)[:, None]
        return self.masks[window, dtype]


class GatheredAttention:
    """The attention of one pass, for all its layers."""

    def __init__(self, rows: PassRows, block_size: int, device: torch.device) -> None:
        self._rows = rows
        self._block_size = block_size
        self._device = device
        self.scratch = Scratch(), Scratch()  # for keys, for values
        self._buckets: dict[int, list[_Bucket]] = {}

    @functools.cached_property
    def _slots(self) -> Tensor:  # [rows]
        return self._tensor(self._rows.slots)

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
        """See specdec.backends.packed_pass.Attention."""
        store.write(layer, self._slots, key, value)
        keys, values = store.layer(layer, key, value)
        heads, kv_heads = query.shape[1], keys.shape[2]
        groups = heads // kv_heads
        key_scratch, value_scratch = self.scratch
        attend = torch.nn.functional.scaled_dot_product_attention if softcap is None else _softcapped(softcap)
        for bucket in self._buckets_of(groups, keys.shape[0] * keys.shape[1]):
            size, max_rows, _ = bucket.visible.shape
            # The query heads of a key head become rows of one head, so that each key is read once.
            grouped = (
                query.index_select(0, bucket.queries)
                .view(size, max_rows, kv_heads, groups, -1)
                .permute(0, 2, 1, 3, 4)
                .reshape(size, kv_heads, max_rows * groups, -1)
            )
            attended = attend(
                grouped,
                bucket.gathered(keys, key_scratch),
                bucket.gathered(values, value_scratch),
                attn_mask=bucket.mask(window, query.dtype, groups),
                scale=scale,
            )
            by_query = (
                attended.view(size, kv_heads, max_rows, groups, -1)
                .permute(0, 2, 1, 3, 4)
                .reshape(-1, heads, output.shape[2])
            )
            by_row = by_query if bucket.query_of_row is None else by_query[bucket.query_of_row]
            output.index_copy_(0, bucket.rows, by_row)

    def _buckets_of(self, groups: int, num_slots: int) -> list[_Bucket]:
        """The buckets for ``groups`` query heads per key head, made once. ``num_slots``: slots of the pool."""
        if groups not in self._buckets:
            alike = defaultdict(list)
            for member in self._rows.members(KEY_COUNTS):
                sizes = _size_class(len(member.rows), _SMALL_ROWS), _size_class(member.num_keys, _SMALL_KEYS)
                alike[member.level, *sizes].append(member)
            row_multiple = ROW_MULTIPLE // math.gcd(groups, ROW_MULTIPLE)
            buckets = [
                self._bucket(part, row_multiple)
                for members in alike.values()
                for part in _parts(members, COPIES * num_slots)
            ]
            self._buckets[groups] = sorted(buckets, key=lambda bucket: -bucket.num_gathered)
        return self._buckets[groups]

    def _bucket(self, members: Sequence[Member], row_multiple: int) -> _Bucket:
        num_rows = rounded(max(len(member.rows) for member in members), row_multiple)
        num_keys = KEY_COUNTS.at_least(members[0].level, max(member.num_keys for member in members))
        queries: list[int] = []
        query_positions: list[int] = []
        rows: list[int] = []
        query_of_row: list[int] = []
        for index, member in enumerate(members):
            padding = num_rows - len(member.rows)
            member_rows = member.pass_rows
            queries += [*member_rows, *[member.start] * padding]
            query_positions += [*(member.row_positions[row] for row in member.rows), *[0] * padding]
            rows += member_rows
            query_of_row += range(index * num_rows, index * num_rows + len(member_rows))
        positions = self._tensor(query_positions).view(len(members), num_rows)
        keys = torch.arange(num_keys, device=self._device)
        visible = keys <= positions[:, :, None]
        key_positions = keys[None]
        trees = [(index, member) for index, member in enumerate(members) if not member.is_chain]
        if trees:
            key_positions = key_positions.repeat(len(members), 1)
        for index, member in trees:
            among = slice(member.segment.num_context, member.num_keys)
            seen = torch.from_numpy(_visible_keys(member.segment.parents, member.rows, len(member.keys)))
            visible[index, : len(member.rows), among] = sent(seen, self._device)
            key_positions[index, among] = self._tensor([member.row_positions[row] for row in member.keys])
        pages, by_block = self._pages(members, num_keys)
        return _Bucket(
            pages=pages,
            by_block=by_block,
            queries=self._tensor(queries),
            query_of_row=None if len(query_of_row) == len(queries) else self._tensor(query_of_row),
            rows=self._tensor(rows),
            visible=visible,
            query_positions=positions,
            key_positions=key_positions,
        )

    def _pages(self, members: Sequence[Member], num_keys: int) -> tuple[Tensor, bool]:
        """The blocks of the keys, or their slots, and whether these are blocks."""
        size = self._block_size
        num_blocks = rounded(num_keys, size) // size
        listed: list[int] = []
        for member in members:
            table = member.segment.block_table[:num_blocks]
            listed += [*table, *[0] * (num_blocks - len(table))]
        blocks = self._tensor(listed)
        moved = [(index, member) for index, member in enumerate(members) if not member.is_contiguous]
        if not moved and num_keys % size == 0:
            return blocks, True
        slots = (blocks[:, None] * size + torch.arange(size, device=self._device)).view(len(members), -1)[:, :num_keys]
        for index, member in moved:
            among = slice(member.segment.num_context, member.num_keys)
            slots[index, among] = self._tensor(self._rows.slots_of(member.segment, member.keys))
        return slots.flatten(), False

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return indices(values, self._device)


def _softcapped(softcap: float) -> Any:
    def attend(query: Tensor, keys: Tensor, values: Tensor, *, attn_mask: Tensor, scale: float) -> Tensor:
        scores = (query @ keys.transpose(2, 3)).float() * scale  # [S, kv_heads, R * groups, N]
        scores = torch.tanh(scores / softcap) * softcap + attn_mask
        return scores.softmax(-1).to(query.dtype) @ values

    return attend


def _parts(members: Sequence[Member], max_keys: int) -> Iterator[list[Member]]:
    """``members`` in chunks that gather at most ``max_keys`` keys each, with at least one member."""
    part: list[Member] = []
    longest = 0
    for member in members:
        longest = max(longest, member.num_keys)
        if part and (len(part) + 1) * KEY_COUNTS.at_least(member.level, longest) > max_keys:
            yield part
            part, longest = [], member.num_keys
        part.append(member)
    yield part


def _size_class(size: int, small: int) -> int:
    """The class of ``size``; sizes of one class share a call. All sizes up to ``small``, then factors of two."""
    return max(0, (size - 1) // small).bit_length()


def _visible_keys(parents: Sequence[int], rows: Sequence[int], num_keys: int) -> np.ndarray:
    """[rows, keys] bool: which of a tree's first rows each of ``rows``, in increasing order, attends to."""
    seen = np.zeros((len(rows), num_keys), dtype=np.bool_)
    index_of = {row: index for index, row in enumerate(rows)}
    for index, row in enumerate(rows):
        seen[index, row] = True
        above = parents[row]
        while above >= 0 and above not in index_of:
            seen[index, above] = True
            above = parents[above]
        if above >= 0:
            seen[index] |= seen[index_of[above]]
    return seen
