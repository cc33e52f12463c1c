"""The rows of a pass, and the keys that each row attends to. No tensors."""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specdec.core.sequence import Draw, SamplingParams

_GREEDY = Draw(SamplingParams(temperature=0.0), 0, 0)


@dataclass(frozen=True, slots=True)
class Segment:
    """The rows of one sequence in a pass, as plain data.

    ``parents[i]`` is the row before row i in the text, or -1 for the last cached position: a row attends to the cached
    context, its ancestors and itself. Position p of the context, and then row r at p = num_context + r, is in block
    ``block_table[p // block_size]``. ``token_ids`` belong to the last rows. The rows before them are in the cache from
    earlier passes, and are attended to but not fed again. ``logit_rows`` are the fed rows that need logits.

    ``num_further``: limit of further rows that the pass may decode after the last row, each with the token drawn after
    the row before it; the block table has room for them. ``draw`` is the first of these draws; None: greedy. A pass may
    also draw after the other rows, in the same way at their positions, but not without ``draw``.

    ``exact``: the rows of a branch get the same bits as the same text without branches, for which each branch reads the
    context separately. A draft does not need this, as its proposals do not decide the output.
    """

    token_ids: Sequence[int]
    parents: Sequence[int]
    num_context: int
    block_table: Sequence[int]
    logit_rows: Sequence[int]
    exact: bool = True
    num_further: int = 0
    draw: Draw | None = None

    @classmethod
    def chain(
        cls,
        token_ids: Sequence[int],
        num_context: int,
        block_table: Sequence[int],
        *,
        logit_rows: Sequence[int] = (),
        exact: bool = True,
    ) -> Segment:
        """Rows one after the other."""
        parents = range(-1, len(token_ids) - 1)
        return cls(token_ids, parents, num_context, block_table=block_table, logit_rows=logit_rows, exact=exact)

    @property
    def num_kept(self) -> int:
        """Number of rows from earlier passes."""
        return len(self.parents) - len(self.token_ids)

    @property
    def positions(self) -> list[int]:
        """Position of each row in the text; siblings have the same."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return [self.num_context + depth for depth in depths]


@dataclass(frozen=True, slots=True)
class KeyCounts:
    """The padded number of keys for a row: the first entry of ``short`` above the row's position, else any multiple of
    ``multiple``.

    The kernel takes keys in blocks of 512, and float32 sums a shorter block in another order. So the length of such a
    block must depend on the row's text alone. Whole blocks after a row's own block change nothing.
    """

    short: tuple[int, ...]
    multiple: int

    def level(self, position: int) -> int:
        """Index into ``short``. Rows of different levels never share a call."""
        return bisect_right(self.short, position)

    def at_least(self, level: int, num_keys: int) -> int:
        """The padded number of keys for rows of one level that attend to at most ``num_keys`` keys."""
        return self.short[level] if level < len(self.short) else rounded(num_keys, self.multiple)


@dataclass(frozen=True, slots=True)
class Member:
    """Rows of one segment that share an attention call. Row numbers are relative to the segment."""

    segment: Segment
    start: int  # index in the pass of the segment's first fed row
    level: int
    rows: Sequence[int]
    keys: Sequence[int]  # rows with keys to attend to, after the context
    row_positions: Sequence[int]  # text positions of all rows of the segment

    @property
    def num_keys(self) -> int:
        return self.segment.num_context + len(self.keys)

    @property
    def pass_rows(self) -> list[int]:
        return [self.start + row - self.segment.num_kept for row in self.rows]

    @property
    def is_contiguous(self) -> bool:
        """Whether the keys are contiguous in the segment's blocks."""
        return self.keys == range(len(self.keys)) or all(row == index for index, row in enumerate(self.keys))

    @property
    def is_chain(self) -> bool:
        """Whether every row attends to all keys up to its own position, and no others."""
        return self.row_positions[self.keys[-1]] == self.num_keys - 1


class PassRows:
    """The fed rows of a pass, segment by segment."""

    def __init__(self, segments: Sequence[Segment], block_size: int) -> None:
        self._segments = segments
        self._block_size = block_size
        self._positions = [segment.positions for segment in segments]
        self.slots: list[int] = []  # for the rows' keys and values
        self.positions: list[int] = []  # of the rows in their texts
        for segment, positions in zip(segments, self._positions, strict=True):
            self.slots += self.slots_of(segment, range(segment.num_kept, len(positions)))
            self.positions += positions[segment.num_kept :]

    def __len__(self) -> int:
        return len(self.slots)

    @functools.cached_property
    def num_further(self) -> int:
        """Further rows per segment: the smallest limit of all. 0 unless all are chains with logits of the last row."""
        num = min((segment.num_further for segment in self._segments), default=0)
        return num if num and all(map(_is_chain_with_last_logits, self._segments)) else 0

    @property
    def draws(self) -> list[Draw]:
        """The draw after the last row of each segment."""
        return [segment.draw or _GREEDY for segment in self._segments]

    def draws_after(self, rows: Sequence[int]) -> list[Draw | None]:
        """The draw after each of these rows of the pass, by its segment's ``draw``."""
        ends = self.last_rows
        draws = [self._segments[bisect_left(ends, row)].draw for row in rows]
        return [
            None if draw is None else draw._replace(position=self.positions[row] + 1)
            for draw, row in zip(draws, rows, strict=True)
        ]

    @property
    def last_rows(self) -> list[int]:
        """The last row of each segment."""
        return [end - 1 for end in itertools.accumulate(len(segment.token_ids) for segment in self._segments)]

    def members(self, counts: KeyCounts, only_chains: bool = False) -> Iterator[Member]:
        start = 0
        for segment, positions in zip(self._segments, self._positions, strict=True):
            yield from members_of(segment, start, positions, counts=counts, only_chains=only_chains)
            start += len(segment.token_ids)

    def key_slots(self, members: Sequence[Member]) -> tuple[np.ndarray, list[int]]:
        """The key slots of all members in one int32 array, and each member's start in it. A member's slots begin at its
        text's first token; after its keys come the slots of further rows and the rest of its last block."""
        size = self._block_size
        blocks: list[int] = []
        starts: list[int] = []
        for member in members:
            starts.append(len(blocks) * size)
            blocks += member.segment.block_table[: -(-(member.num_keys + self.num_further) // size)]
        slots: np.ndarray = (np.array(blocks, np.int32)[:, None] * size + np.arange(size, dtype=np.int32)).reshape(-1)
        for member, start in zip(members, starts, strict=True):
            if not member.is_contiguous:
                after = start + member.segment.num_context
                slots[after : after + len(member.keys)] = self.slots_of(member.segment, member.keys)
        return slots, starts

    def slots_of(self, segment: Segment, rows: Iterable[int]) -> list[int]:
        size = self._block_size
        positions = [segment.num_context + row for row in rows]
        return [segment.block_table[position // size] * size + position % size for position in positions]


def _is_chain_with_last_logits(segment: Segment) -> bool:
    last = len(segment.parents) - 1
    return list(segment.parents) == list(range(-1, last)) and last in segment.logit_rows


def members_of(
    segment: Segment, start: int, row_positions: Sequence[int], counts: KeyCounts, only_chains: bool = False
) -> Iterator[Member]:
    """The rows of a segment, split into members that need different numbers of keys.

    A row of a tree is stored after its siblings, and the kernel's order of summation depends on a key's index among the
    masked keys. So exact rows are computed as chains, each with the keys of its path only.
    """
    first = segment.num_context
    by_level: dict[int, list[int]] = {}
    for row in range(segment.num_kept, len(row_positions)):
        by_level.setdefault(counts.level(row_positions[row]), []).append(row)
    for level, rows in by_level.items():
        last = rows[-1]
        last_level = counts.level(first + last)
        whole = Member(segment, start, last_level, rows=rows, keys=range(last + 1), row_positions=row_positions)
        if whole.is_chain or not (segment.exact or only_chains):
            yield whole
            continue
        for path, num_shared in paths(segment.parents):
            new = (row for row in path[num_shared:] if row >= segment.num_kept)
            path_rows = [row for row in new if counts.level(row_positions[row]) == level]
            if path_rows:
                keys = path[: row_positions[path_rows[-1]] + 1 - first]
                yield Member(segment, start, level, rows=path_rows, keys=keys, row_positions=row_positions)


def paths(parents: Sequence[int]) -> list[tuple[list[int], int]]:
    """The paths of a tree from root to leaf, and for each the number of leading rows that an earlier path has too."""
    path_of: list[list[int]] = []
    listed: list[tuple[list[int], int]] = []
    for row, parent in enumerate(parents):
        path = path_of[parent] if parent >= 0 else []
        if not path or path[-1] != parent:
            path = path[: path.index(parent) + 1] if path else []
            listed.append((path, len(path)))
        path.append(row)
        path_of.append(path)
    return listed


def rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
