"""Attention of packed rows over paged keys and values, as a transformers attention function.

Knows which rows see which keys; refuses to know models and sequences' lives. Segments of similar size are attended to
in one call. So that the bits of a row do not depend on its company, the tree below it or the chunks of its prompt,
every call keeps to what the kernel of ``scaled_dot_product_attention`` needs (measured, see bench/LOG.md): query rows
per key head in multiples of four, and keys, from the first one on, as many as ``KeyCounts`` says for their positions.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from specdec.kv_store import KvStore

ATTENTION = "specdec_packed"

ROW_MULTIPLE = 4
_SMALL = 16
_FEW_KEYS = 256


@dataclass(frozen=True, slots=True)
class KeyCounts:
    """How many keys a row is attended over. The first that its own position in the text is below, and no other.

    The kernel takes keys in blocks of 512, and float32 sums a shorter block in another order. So its length must not
    depend on anything but the row's text. Whole blocks after a row's own change nothing: beyond ``short`` any multiple
    of ``multiple`` will do.
    """

    short: tuple[int, ...]
    multiple: int

    def level(self, position: int) -> int:
        """Rows of different levels are never attended to in one call."""
        return bisect_right(self.short, position)

    def at_least(self, level: int, num_keys: int) -> int:
        """For rows of one level, which see ``num_keys`` at most."""
        return self.short[level] if level < len(self.short) else _rounded(num_keys, self.multiple)


KEY_COUNTS = {torch.bfloat16: KeyCounts((), 16)}
KEY_COUNTS_OTHERWISE = KeyCounts((64, 128, 256), 512)


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's rows in a pass: plain data.

    ``parents[i]`` is the row before row i in the text, or -1 if that is the last cached position: a row sees the
    cached context, its ancestors and itself. Position p of the context and then row r (p = num_context + r) are in
    block ``block_table[p // block_size]``. ``logit_rows`` are the rows whose logits are wanted.
    """

    token_ids: Sequence[int]
    parents: Sequence[int]
    num_context: int
    block_table: Sequence[int]
    logit_rows: Sequence[int]

    @property
    def is_chain(self) -> bool:
        return all(parent == row - 1 for row, parent in enumerate(self.parents))

    @property
    def positions(self) -> list[int]:
        """Of each row in the text: siblings have the same."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return [self.num_context + depth for depth in depths]


@dataclass(frozen=True, slots=True)
class _Member:
    """Rows of one segment that are attended to in one call."""

    segment: Segment
    start: int  # the pass row of the segment's first
    level: int
    rows: Sequence[int]  # counted in the segment, as in ``path``
    positions: Sequence[int]  # of ``rows``
    end: int  # the number of keys
    path: Sequence[int] | None = None  # the rows whose keys follow the context; None: all, in their order
    is_tree: bool = False  # some of ``rows`` do not see each other

    @property
    def pass_rows(self) -> list[int]:
        return [self.start + row for row in self.rows]


@dataclass(slots=True)
class _Bucket:
    """Members attended to in one call; S members of up to R rows over up to N keys."""

    slots: Tensor  # [S * N]: of the keys
    shape: tuple[int, int]  # S, R
    queries: Tensor  # [S * R]: the pass row of each query; of padding, any
    places: Tensor | None  # [rows]: where the rows are among the queries; None: there is no padding
    rows: Tensor  # [rows]: their pass rows
    visible: Tensor  # [S, R, N] bool
    query_positions: Tensor  # [S, R]
    key_positions: Tensor  # [S or 1, N]
    masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype, groups: int) -> Tensor:
        """What is added to the scores: 0 or -inf, [S, 1, R * groups, N]."""
        if (window, dtype) not in self.masks:
            visible = self.visible
            if window is not None:
                visible = visible & (self.query_positions[:, :, None] - self.key_positions[:, None, :] < window)
            hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
            self.masks[window, dtype] = hidden.repeat_interleave(groups, dim=1)[:, None]
        return self.masks[window, dtype]


class PackedPass:
    """What the attention function knows of a pass. ``slots`` [rows] are where the rows' keys and values go."""

    def __init__(self, store: KvStore, segments: Sequence[Segment], block_size: int, device: torch.device) -> None:
        self.store = store
        self.positions = [segment.positions for segment in segments]
        self._segments = segments
        self._block_size = block_size
        self._device = device
        self._row_slots = [
            segment.block_table[position // block_size] * block_size + position % block_size
            for segment in segments
            for position in range(segment.num_context, segment.num_context + len(segment.token_ids))
        ]
        self.slots = self._tensor(self._row_slots)
        self._buckets: dict[tuple[int, torch.dtype], list[_Bucket]] = {}

    def buckets(self, groups: int, dtype: torch.dtype) -> list[_Bucket]:
        """For ``groups`` query heads per key head. Made at the first layer that asks."""
        if (groups, dtype) not in self._buckets:
            counts = KEY_COUNTS.get(dtype, KEY_COUNTS_OTHERWISE)
            alike = defaultdict(list)
            start = 0
            for segment, positions in zip(self._segments, self.positions, strict=True):
                for member in _members(segment, start, positions, counts):
                    sizes = _class(len(member.rows), _SMALL), _class(member.end, _FEW_KEYS)
                    alike[member.level, *sizes].append(member)
                start += len(positions)
            row_multiple = ROW_MULTIPLE // math.gcd(groups, ROW_MULTIPLE)
            self._buckets[groups, dtype] = [self._bucket(members, row_multiple, counts) for members in alike.values()]
        return self._buckets[groups, dtype]

    def _bucket(self, members: Sequence[_Member], row_multiple: int, counts: KeyCounts) -> _Bucket:
        num_rows = _rounded(max(len(member.rows) for member in members), row_multiple)
        num_keys = counts.at_least(members[0].level, max(member.end for member in members))
        queries: list[int] = []
        query_positions: list[int] = []
        rows: list[int] = []
        places: list[int] = []
        for place, member in enumerate(members):
            padding = num_rows - len(member.rows)
            own = member.pass_rows
            queries += [*own, *[member.start] * padding]
            query_positions += [*member.positions, *[0] * padding]
            rows += own
            places += range(place * num_rows, place * num_rows + len(own))
        shape = (len(members), num_rows)
        positions = self._tensor(query_positions).view(shape)
        keys = torch.arange(num_keys, device=self._device)
        visible = keys <= positions[:, :, None]
        key_positions = keys[None]
        trees = [(place, member) for place, member in enumerate(members) if member.is_tree]
        if trees:
            key_positions = key_positions.repeat(len(members), 1)
        for place, member in trees:
            among = slice(member.segment.num_context, member.end)
            visible[place, : len(member.rows), among] = _ancestors(member.segment.parents).to(self._device)
            key_positions[place, among] = self._tensor(member.positions)
        return _Bucket(
            self._key_slots(members, num_keys),
            shape,
            self._tensor(queries),
            None if len(places) == len(queries) else self._tensor(places),
            self._tensor(rows),
            visible,
            positions,
            key_positions,
        )

    def _key_slots(self, members: Sequence[_Member], num_keys: int) -> Tensor:
        size = self._block_size
        num_blocks = _rounded(num_keys, size) // size
        blocks: list[int] = []
        for member in members:
            table = member.segment.block_table[:num_blocks]
            blocks += [*table, *[0] * (num_blocks - len(table))]
        firsts = self._tensor(blocks).view(len(members), num_blocks, 1) * size
        slots = (firsts + torch.arange(size, device=self._device)).flatten(1)[:, :num_keys].flatten()
        for place, member in enumerate(members):
            if member.path is not None:
                path = [self._row_slots[member.start + row] for row in member.path]
                slots[place * num_keys + member.segment.num_context :][: len(path)] = self._tensor(path)
        return slots

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,  # [1, heads, rows, head_dim]
    key: Tensor,  # [1, kv_heads, rows, head_dim]
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    packed_pass: PackedPass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention of each row over its own text. Returns [1, rows, heads, head_dim]."""
    num_rows = len(packed_pass.slots)
    layer: int = module.layer_idx  # type: ignore[assignment]
    keys, values = packed_pass.store.write(
        layer, packed_pass.slots, key[0, :, :num_rows].transpose(0, 1), value[0, :, :num_rows].transpose(0, 1)
    )
    heads, kv_heads = query.shape[1], key.shape[1]
    groups = heads // kv_heads
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    by_row = query[0].transpose(0, 1)  # [rows, heads, head_dim]
    output = query.new_zeros(query.shape[2], heads, value.shape[-1])
    for bucket in packed_pass.buckets(groups, query.dtype):
        size, most_rows = bucket.shape
        # The query heads of a key head become rows of one head, so that no key is read twice.
        grouped = (
            by_row.index_select(0, bucket.queries)
            .view(size, most_rows, kv_heads, groups, -1)
            .permute(0, 2, 1, 3, 4)
            .reshape(size, kv_heads, most_rows * groups, -1)
        )
        attend = torch.nn.functional.scaled_dot_product_attention if softcap is None else _softcapped(softcap)
        attended = attend(
            grouped,
            keys.index_select(0, bucket.slots).view(size, -1, *keys.shape[1:]).transpose(1, 2),
            values.index_select(0, bucket.slots).view(size, -1, *values.shape[1:]).transpose(1, 2),
            attn_mask=bucket.mask(sliding_window, query.dtype, groups),
            scale=scale,
        )
        by_query = (
            attended.view(size, kv_heads, most_rows, groups, -1)
            .permute(0, 2, 1, 3, 4)
            .reshape(-1, heads, output.shape[2])
        )
        output.index_copy_(0, bucket.rows, by_query if bucket.places is None else by_query[bucket.places])
    return output[None], None


def _softcapped(softcap: float) -> Any:
    def attend(query: Tensor, keys: Tensor, values: Tensor, *, attn_mask: Tensor, scale: float) -> Tensor:
        scores = (query @ keys.transpose(2, 3)).float() * scale  # [S, kv_heads, R * groups, N]
        scores = torch.tanh(scores / softcap) * softcap + attn_mask
        return scores.softmax(-1).to(query.dtype) @ values

    return attend


def _members(segment: Segment, start: int, positions: Sequence[int], counts: KeyCounts) -> Iterator[_Member]:
    """The rows of a segment, apart where their keys must be counted differently.

    A row of a tree is stored after its siblings, beyond its position. Where that may be in another level, the tree is
    taken for what it is to its rows: chains, each with the keys of its own path and no others.
    """
    first, end = segment.num_context, segment.num_context + len(positions)
    own = range(len(positions))
    is_chain = segment.is_chain
    if counts.level(first) == counts.level(end - 1):
        yield _Member(segment, start, counts.level(first), own, positions, end, is_tree=not is_chain)
        return
    for path, num_shared in [(own, 0)] if is_chain else _paths(segment.parents):
        for level, of_level in groupby(path[num_shared:], lambda row: counts.level(positions[row])):
            rows = list(of_level)
            end = positions[rows[-1]] + 1
            yield _Member(
                segment, start, level, rows, [positions[row] for row in rows], end,
                path=None if is_chain else path[: end - first],
            )  # fmt: skip


def _paths(parents: Sequence[int]) -> Iterator[tuple[Sequence[int], int]]:
    """Paths down a tree, and how many rows at the beginning of each are also in one before it."""
    path_of: list[list[int]] = []
    paths: list[tuple[list[int], int]] = []
    for row, parent in enumerate(parents):
        path = path_of[parent] if parent >= 0 else []
        if not path or path[-1] != parent:
            path = path[: path.index(parent) + 1] if path else []
            paths.append((path, len(path)))
        path.append(row)
        path_of.append(path)
    yield from paths


def _class(size: int, small: int) -> int:
    """Sizes that share a call: all up to ``small``, then within a factor of two."""
    return max(0, (size - 1) // small).bit_length()


def _rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _ancestors(parents: Sequence[int]) -> Tensor:
    """[rows, rows] bool: what each row of a tree sees of it."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen[row] |= seen[parent]
    return seen


AttentionInterface.register(ATTENTION, packed_attention)
