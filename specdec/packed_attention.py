"""Attention of packed rows over paged keys and values, as a transformers attention function.

Knows which rows see which keys; refuses to know models and sequences' lives. Segments of similar size are attended to
in one call. So that the bits of a row do not depend on its company, its neighbours in the tree or the chunks of its
prompt, every call keeps to what the kernel of ``scaled_dot_product_attention`` needs (measured, see bench/LOG.md):
query rows per key head in multiples of four, and keys, from the first one on, in multiples of KEY_MULTIPLE.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface

from specdec.kv_store import KvStore

ATTENTION = "specdec_packed"

ROW_MULTIPLE = 4
KEY_MULTIPLE = {torch.bfloat16: 16}
KEY_MULTIPLE_OTHERWISE = 512  # the kernel takes keys in blocks of 512, and float32 sums a shorter one differently
_SMALL = 16
_FEW_KEYS = 256


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


@dataclass(slots=True)
class _Bucket:
    """Segments attended to in one call; S segments of up to R rows over up to N keys."""

    blocks: Tensor  # [S * N / block_size]
    shape: tuple[int, int]  # S, R
    queries: Tensor  # [S * R]: the pass row of each query; of padding, any
    places: Tensor | None  # [rows]: where the rows are among the queries; None: there is no padding
    rows: Tensor  # [rows]: their pass rows
    visible: Tensor  # [S, R, N] bool
    distance: Tensor  # [S, R, N]: query position - key position
    masks: dict[tuple[int | None, torch.dtype], Tensor] = field(default_factory=dict)

    def mask(self, window: int | None, dtype: torch.dtype, groups: int) -> Tensor:
        """What is added to the scores: 0 or -inf, [S, 1, R * groups, N]."""
        if (window, dtype) not in self.masks:
            visible = self.visible if window is None else self.visible & (self.distance < window)
            hidden = torch.zeros(visible.shape, dtype=dtype, device=visible.device).masked_fill_(~visible, -torch.inf)
            self.masks[window, dtype] = hidden.repeat_interleave(groups, dim=1)[:, None]
        return self.masks[window, dtype]


class PackedPass:
    """What the attention function knows of a pass. ``slots`` [rows] are where the rows' keys and values go."""

    def __init__(self, store: KvStore, segments: Sequence[Segment], block_size: int, device: torch.device) -> None:
        self.store = store
        self.positions = [segment.positions for segment in segments]
        self.slots = torch.tensor(
            [
                segment.block_table[position // block_size] * block_size + position % block_size
                for segment in segments
                for position in range(segment.num_context, segment.num_context + len(segment.token_ids))
            ],
            dtype=torch.int64,
            device=device,
        )
        self._segments = segments
        self._block_size = block_size
        self._device = device
        self._buckets: dict[tuple[int, torch.dtype], list[_Bucket]] = {}

    def buckets(self, groups: int, dtype: torch.dtype) -> list[_Bucket]:
        """For ``groups`` query heads per key head. Made at the first layer that asks."""
        if (groups, dtype) not in self._buckets:
            alike = defaultdict(list)
            start = 0
            for segment, positions in zip(self._segments, self.positions, strict=True):
                num_rows = len(positions)
                alike[_class(num_rows, _SMALL), _class(segment.num_context + num_rows, _FEW_KEYS)].append(
                    (start, segment, positions)
                )
                start += num_rows
            row_multiple = ROW_MULTIPLE // math.gcd(groups, ROW_MULTIPLE)
            self._buckets[groups, dtype] = [self._bucket(members, row_multiple, dtype) for members in alike.values()]
        return self._buckets[groups, dtype]

    def _bucket(
        self, members: Sequence[tuple[int, Segment, list[int]]], row_multiple: int, dtype: torch.dtype
    ) -> _Bucket:
        num_rows = _rounded(max(len(positions) for _, _, positions in members), row_multiple)
        most_keys = max(segment.num_context + len(positions) for _, segment, positions in members)
        num_keys = _rounded(most_keys, max(KEY_MULTIPLE.get(dtype, KEY_MULTIPLE_OTHERWISE), self._block_size))
        num_blocks = num_keys // self._block_size
        blocks: list[int] = []
        queries: list[int] = []
        last_seen: list[int] = []  # by each query: of a chain, that is all there is to it
        query_positions: list[int] = []
        rows: list[int] = []
        places: list[int] = []
        for place, (start, segment, positions) in enumerate(members):
            padding = num_rows - len(positions)
            own = range(start, start + len(positions))
            blocks += [*segment.block_table[:num_blocks], *[0] * (num_blocks - len(segment.block_table))]
            queries += [*own, *[start] * padding]
            end = segment.num_context + len(positions)
            last_seen += [*range(segment.num_context, end), *[0] * padding]
            query_positions += [*positions, *[0] * padding]
            rows += own
            places += range(place * num_rows, place * num_rows + len(positions))
        keys = torch.arange(num_keys, device=self._device)
        shape = (len(members), num_rows)
        visible = keys <= self._tensor(last_seen).view(*shape, 1)
        key_positions = keys.expand(len(members), num_keys)
        trees = [(place, *member[1:]) for place, member in enumerate(members) if not member[1].is_chain]
        if trees:
            key_positions = key_positions.clone()
        for place, segment, positions in trees:
            among = slice(segment.num_context, segment.num_context + len(positions))
            visible[place, : len(positions), among] = _ancestors(segment.parents).to(self._device)
            key_positions[place, among] = self._tensor(positions)
        return _Bucket(
            self._tensor(blocks),
            shape,
            self._tensor(queries),
            None if len(places) == len(queries) else self._tensor(places),
            self._tensor(rows),
            visible,
            self._tensor(query_positions).view(*shape, 1) - key_positions[:, None, :],
        )

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
    """Attention of each segment over its own blocks. Returns [1, rows, heads, head_dim]."""
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
            keys.index_select(0, bucket.blocks).view(size, -1, *keys.shape[2:]).transpose(1, 2),
            values.index_select(0, bucket.blocks).view(size, -1, *values.shape[2:]).transpose(1, 2),
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
