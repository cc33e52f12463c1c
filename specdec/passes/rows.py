"""The rows of a pass, and over which keys each is attended to. No tensors.

Knows texts, positions and trees; refuses to know how attention is computed.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from specdec.core.sequence import Draw, SamplingParams

_LIKELIEST = Draw(SamplingParams(temperature=0.0), 0, 0)


@dataclass(frozen=True, slots=True)
class Segment:
    """One sequence's rows in a pass: plain data.

    ``parents[i]`` is the row before row i in the text, or -1 if that is the last cached position: a row sees the
    cached context, its ancestors and itself. Position p of the context and then row r (p = num_context + r) are in
    block ``block_table[p // block_size]``. ``token_ids`` are of the last rows: those before them are in their slots
    from earlier passes, and are seen, but not fed again. ``logit_rows`` are the fed rows whose logits are wanted.

    ``num_further``: so many rows more are welcome after the last one, each of the token that is drawn after the row
    before it; the block table has room for them. ``draw`` is the first of these draws; None: the likeliest token.

    ``exact``: the rows of a branch get the bits of the same text without branches, for which each branch reads the
    context for itself. A draft does without: what it proposes decides nothing.
    """

    token_ids: Sequence[int]
    parents: Sequence[int]
    num_context: int
    block_table: Sequence[int]
    logit_rows: Sequence[int]
    exact: bool = True
    num_further: int = 0
    draw: Draw | None = None

    @property
    def num_kept(self) -> int:
        """Rows of earlier passes."""
        return len(self.parents) - len(self.token_ids)

    @property
    def positions(self) -> list[int]:
        """Of each row in the text: siblings have the same."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return [self.num_context + depth for depth in depths]


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
        return self.short[level] if level < len(self.short) else rounded(num_keys, self.multiple)


@dataclass(frozen=True, slots=True)
class Member:
    """Rows of one segment that are attended to in one call. Rows are counted in the segment."""

    segment: Segment
    start: int  # the pass row of the segment's first that is fed
    level: int
    rows: Sequence[int]
    keys: Sequence[int]  # the rows whose keys follow those of the context
    row_positions: Sequence[int]  # of all rows of the segment

    @property
    def num_keys(self) -> int:
        return self.segment.num_context + len(self.keys)

    @property
    def pass_rows(self) -> list[int]:
        return [self.start + row - self.segment.num_kept for row in self.rows]

    @property
    def is_stored_so(self) -> bool:
        """The keys are one after the other in the segment's blocks."""
        return self.keys == range(len(self.keys)) or all(row == place for place, row in enumerate(self.keys))

    @property
    def is_chain(self) -> bool:
        """Every row sees all keys up to its own position, and no others."""
        return self.row_positions[self.keys[-1]] == self.num_keys - 1


class PassRows:
    """The fed rows of a pass, one segment's after the other's."""

    def __init__(self, segments: Sequence[Segment], block_size: int) -> None:
        self._segments = segments
        self._block_size = block_size
        self._positions = [segment.positions for segment in segments]
        self.slots: list[int] = []  # where the rows' keys and values go
        self.positions: list[int] = []  # of the rows in their texts
        for segment, positions in zip(segments, self._positions, strict=True):
            self.slots += self.slots_of(segment, range(segment.num_kept, len(positions)))
            self.positions += positions[segment.num_kept :]

    def __len__(self) -> int:
        return len(self.slots)

    @functools.cached_property
    def num_further(self) -> int:
        """Rows that may follow, of each segment: as many as all of them want, if all are chains whose ends are read."""
        most = min((segment.num_further for segment in self._segments), default=0)
        return most if most and all(map(_is_read_to_its_end, self._segments)) else 0

    @property
    def draws(self) -> list[Draw]:
        """Of each segment the one after its last row."""
        return [segment.draw or _LIKELIEST for segment in self._segments]

    @property
    def last_rows(self) -> list[int]:
        """Of each segment."""
        return [end - 1 for end in itertools.accumulate(len(segment.token_ids) for segment in self._segments)]

    def members(self, counts: KeyCounts, only_chains: bool = False) -> Iterator[Member]:
        start = 0
        for segment, positions in zip(self._segments, self._positions, strict=True):
            yield from members_of(segment, start, positions, counts, only_chains)
            start += len(segment.token_ids)

    def key_slots(self, members: Sequence[Member]) -> tuple[np.ndarray, list[int]]:
        """Where the keys of each member are, from its text's first token on, in one array, int32; and where in it
        those of each begin. After them come those of rows that may follow, and other slots of its last block."""
        size = self._block_size
        blocks: list[int] = []
        starts: list[int] = []
        for member in members:
            starts.append(len(blocks) * size)
            blocks += member.segment.block_table[: -(-(member.num_keys + self.num_further) // size)]
        slots: np.ndarray = (np.array(blocks, np.int32)[:, None] * size + np.arange(size, dtype=np.int32)).reshape(-1)
        for member, start in zip(members, starts, strict=True):
            if not member.is_stored_so:
                after = start + member.segment.num_context
                slots[after : after + len(member.keys)] = self.slots_of(member.segment, member.keys)
        return slots, starts

    def slots_of(self, segment: Segment, rows: Iterable[int]) -> list[int]:
        size = self._block_size
        positions = [segment.num_context + row for row in rows]
        return [segment.block_table[position // size] * size + position % size for position in positions]


def _is_read_to_its_end(segment: Segment) -> bool:
    last = len(segment.parents) - 1
    return list(segment.parents) == list(range(-1, last)) and last in segment.logit_rows


def members_of(
    segment: Segment, start: int, row_positions: Sequence[int], counts: KeyCounts, only_chains: bool = False
) -> Iterator[Member]:
    """The rows of a segment, apart where their keys must be counted differently.

    A row of a tree is stored after its siblings, and the kernel sums in an order that depends on where a key stands
    among those that are hidden. So exact rows are taken for what they are to themselves: chains, each with the keys
    of its own path and no others.
    """
    first = segment.num_context
    by_level: dict[int, list[int]] = {}
    for row in range(segment.num_kept, len(row_positions)):
        by_level.setdefault(counts.level(row_positions[row]), []).append(row)
    for level, rows in by_level.items():
        last = rows[-1]
        whole = Member(segment, start, counts.level(first + last), rows, range(last + 1), row_positions)
        if whole.is_chain or not (segment.exact or only_chains):
            yield whole
            continue
        for path, num_shared in paths(segment.parents):
            new = (row for row in path[num_shared:] if row >= segment.num_kept)
            own = [row for row in new if counts.level(row_positions[row]) == level]
            if own:
                keys = path[: row_positions[own[-1]] + 1 - first]
                yield Member(segment, start, level, own, keys, row_positions)


def paths(parents: Sequence[int]) -> list[tuple[list[int], int]]:
    """Paths down a tree, and how many rows at the beginning of each are in one before it too."""
    path_of: list[list[int]] = []
    found: list[tuple[list[int], int]] = []
    for row, parent in enumerate(parents):
        path = path_of[parent] if parent >= 0 else []
        if not path or path[-1] != parent:
            path = path[: path.index(parent) + 1] if path else []
            found.append((path, len(path)))
        path.append(row)
        path_of.append(path)
    return found


def rounded(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
