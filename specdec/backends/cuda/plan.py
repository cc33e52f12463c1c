"""A pass as a description in one int32 array, which kernels read. No tensors.

Sections of the array have names. ``chains`` are the texts that rows see. A branch of a tree is a chain of its own. Its
last keys are listed slot by slot, because they are stored among those of other branches. An *item* is the work of one
kernel program: up to ROWS rows of a chain, over one run of RUN keys or over all of them. Run boundaries depend on
positions alone, so a row's bits do not depend on the other rows, on branches, or on how its text was fed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from specdec.core.sequence import Draw
from specdec.passes.rows import KeyCounts, PassRows

ROWS, RUN = 8, 512
"""Most rows of an item; keys of a run."""

START, COUNT, KEYS, TABLE, TAIL, TAIL_FROM = range(6)
"""Columns of ``chains``: index of the first row in ``chain_rows``, rows, keys that the last row sees, index of the
first block in ``blocks``, index of the first tail slot in ``blocks``, position from which keys are in tail slots."""

ALL = -1
"""Run of an item that covers all of them."""

PADDING = -1
"""Slot of a row that is not stored."""

_ROW_CLASSES = (16, 32, 64, 128, 256, 512)
_ITEM_CLASSES = (16, 64, 256, 512)
_BLOCK_CLASSES = (1 << 12, 1 << 15, 1 << 18)
_MAX_TILES, _MAX_ITEMS = 64, 512
"""A pass with more gives each item all keys: there are enough programs, and partial results take memory."""

_ANY_COUNT = KeyCounts((), 1)
_MASK = (1 << 64) - 1


class Shape(NamedTuple):
    """A size class: the lengths of a description's sections, and whether an item has a run of its own. A GPU captures
    one graph for each."""

    rows: int
    logits: int
    items: int
    blocks: int
    in_runs: bool

    @property
    def sections(self) -> Iterator[tuple[str, type, tuple[int, ...]]]:
        """Name, number type and shape of each section, in order. Those of eight bytes are first, so all are aligned."""
        rows, logits, items, blocks, _ = self
        yield from ((name, np.int64, (rows,)) for name in ("token_ids", "positions"))
        yield from ((name, np.int64, (logits,)) for name in ("logit_rows", "seeds", "draw_positions"))
        yield "temperatures", np.float64, (logits,)
        yield from ((name, np.int32, (rows,)) for name in ("slots", "chain_rows"))
        yield "chains", np.int32, (rows, 6)
        yield "items", np.int32, (items, 4)
        yield "blocks", np.int32, (blocks,)

    def class_of(self) -> Shape:
        """The class of a pass of this size. No class has a single row: libraries compute that in another way."""
        return Shape(
            _at_least(self.rows, _ROW_CLASSES),
            _at_least(self.logits, _ROW_CLASSES),
            _at_least(self.items + -(-_at_least(self.rows, _ROW_CLASSES) // ROWS), _ITEM_CLASSES),
            _at_least(self.blocks, _BLOCK_CLASSES),
            self.in_runs,
        )


class Chain(NamedTuple):
    """Rows at the end of one text. ``rows``: their indices in the pass; ``table``: the segment's blocks; ``tail``:
    slots of the last keys, if they are not in these blocks by position."""

    rows: Sequence[int]
    num_keys: int
    table: Sequence[int]
    tail: Sequence[int]


class Inputs(NamedTuple):
    """What the model reads beside attention: by row, and by row with logits."""

    token_ids: Sequence[int]
    positions: Sequence[int]
    logit_rows: Sequence[int]
    draws: Sequence[Draw | None]


class Plan:
    """The description of a pass, apart from padding. ``num_further``: keys that each chain gets after the pass."""

    def __init__(self, chains: Sequence[Chain], slots: Sequence[int], block_size: int, num_further: int = 0) -> None:
        self.texts, self.slots, self.block_size = chains, slots, block_size
        self.chain_rows = [row for chain in chains for row in chain.rows]
        self.blocks: list[int] = []
        self.chains: list[tuple[int, ...]] = []
        tables: dict[int, tuple[int, int]] = {}  # by segment: where its blocks begin, and how many there are
        start = 0
        for chain in chains:
            num_blocks = -(-(chain.num_keys + num_further) // block_size)
            if tables.get(id(chain.table), (0, 0))[1] < num_blocks:
                tables[id(chain.table)] = len(self.blocks), num_blocks
                self.blocks += chain.table[:num_blocks]
            table, _ = tables[id(chain.table)]
            tail_from = chain.num_keys - len(chain.tail) if chain.tail else chain.num_keys + num_further
            size = start, len(chain.rows), chain.num_keys
            self.chains.append((*size, table, len(self.blocks), tail_from))
            self.blocks += chain.tail
            start += len(chain.rows)
        self.items = list(_items([(len(chain.rows), chain.num_keys + num_further) for chain in chains]))

    @classmethod
    def of(cls, rows: PassRows, block_size: int) -> Plan:
        """The description of all rows of a pass."""
        chains = []
        for member in rows.members(_ANY_COUNT, only_chains=True):
            tail = () if member.is_contiguous else rows.slots_of(member.segment, member.keys)
            chains.append(Chain(member.pass_rows, member.num_keys, member.segment.block_table, tail))
        return cls(chains, rows.slots, block_size)

    def shape(self, num_logits: int = 0) -> Shape:
        """The exact size."""
        in_runs = any(run != ALL for _, _, run, _ in self.items)
        return Shape(len(self.slots), num_logits, len(self.items), max(1, len(self.blocks)), in_runs)

    def next(self, last_rows: Sequence[int], num_further: int) -> Plan:
        """The description of a pass of the next row of each chain, where ``last_rows`` of this one end. All its numbers
        advance by one row with each of ``num_further`` passes."""
        chain_of = {chain.rows[-1]: chain for chain in self.texts}
        chains, slots = [], []
        for index, row in enumerate(last_rows):
            position, table = chain_of[row].num_keys, chain_of[row].table
            chains.append(Chain([index], position + 1, table, ()))
            slots.append(table[position // self.block_size] * self.block_size + position % self.block_size)
        return Plan(chains, slots, self.block_size, num_further=num_further - 1)

    def write(self, sections: dict[str, np.ndarray], inputs: Inputs | None = None) -> None:
        """Write all of ``sections``, which are those of a shape that is at least as large. Padding rows are token 0 at
        position 0, see nothing and are stored nowhere; padding logits are those of the last row."""
        num_rows, num_padding = len(self.slots), len(sections["slots"]) - len(self.slots)
        _put(sections["slots"], self.slots, PADDING)
        _put(sections["chain_rows"], [*self.chain_rows, *range(num_rows, num_rows + num_padding)], 0)
        items = self.items
        chains = self.chains
        if num_padding:
            items = [*items, *((len(chains), first, ALL, 1) for first in range(0, num_padding, ROWS))]
            chains = [*chains, (num_rows, num_padding, 0, 0, 0, 0)]
        _put(sections["chains"], chains, 0)
        _put(sections["items"], items, -1)
        sections["blocks"][: len(self.blocks)] = self.blocks
        if inputs is None:
            return
        draws = [draw if draw is not None and kernel_draws(draw) else None for draw in inputs.draws]
        _put(sections["token_ids"], inputs.token_ids, 0)
        _put(sections["positions"], inputs.positions, 0)
        _put(sections["logit_rows"], inputs.logit_rows, inputs.logit_rows[-1] if inputs.logit_rows else 0)
        _put(sections["seeds"].view(np.uint64), [0 if draw is None else draw.seed & _MASK for draw in draws], 0)
        _put(sections["draw_positions"], [0 if draw is None else draw.position for draw in draws], 0)
        _put(sections["temperatures"], [0.0 if draw is None else draw.sampling.temperature for draw in draws], 0)


def kernel_draws(draw: Draw) -> bool:
    """Whether the token of ``draw`` depends on temperature and noise alone."""
    sampling = draw.sampling
    return sampling.greedy or (sampling.top_k == 0 and sampling.top_p >= 1.0 and sampling.min_p <= 0.0)


def _items(chains: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Chain, first row, run and number of runs of each item, for chains of so many rows and keys."""
    tiles = [
        (chain, first, -(-(num_keys - num_rows + min(first + ROWS, num_rows)) // RUN))
        for chain, (num_rows, num_keys) in enumerate(chains)
        for first in range(0, num_rows, ROWS)
    ]
    whole = len(tiles) > _MAX_TILES or sum(num_runs for *_, num_runs in tiles) > _MAX_ITEMS
    for chain, first, num_runs in tiles:
        if whole or num_runs == 1:
            yield chain, first, ALL, 1
        else:
            yield from ((chain, first, run, num_runs) for run in range(num_runs))


def _put(section: np.ndarray, values: Sequence[object], padding: object) -> None:
    if values:
        section[: len(values)] = values
    section[len(values) :] = padding


@functools.cache
def _at_least(size: int, classes: tuple[int, ...]) -> int:
    """The smallest class that is not below ``size``; above them, multiples of the largest."""
    return next((limit for limit in classes if limit >= size), -(-size // classes[-1]) * classes[-1])
