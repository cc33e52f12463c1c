"""The paged KV cache: block tables, rollback and sharing. No tensors.

The pool consists of blocks of ``block_size`` slots, one slot per position. A sequence's block table lists its blocks
in order, so a rollback, or keeping one path of a verified tree, moves a few rows at most. The pool remembers the text
of blocks for reuse by a request with the same prefix, another sample of the request or the next turn of a
conversation. Full blocks are shared, as they are never written again; of a partial block the matching rows are copied.

One thread uses a pool and its sequences.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

from specdec.kvcache.prefix_index import ID_BYTES, TextBlock, Walk, packed


class PoolFullError(Exception):
    """Not enough free blocks. The call took none."""


class Move(NamedTuple):
    """A copy of the keys and values in slot ``source`` to slot ``target``, in every layer.

    A list of moves is one gather, then one scatter. It must run before the next ``remember`` or ``attach`` of any
    sequence and before the next pass. The lists that ``keep`` returns for several sequences may be joined.
    """

    source: int
    target: int


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` slots. Slot = block * block_size + position % block_size.

    A block is free, held by sequences, or idle: remembered for its text, but not held. Idle blocks are evicted when
    room is needed, least recently used first. A sequence that holds a block holds all blocks before it, and releases
    them from the last to the first. So a block always comes before its parent in the order of eviction.
    """

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._idle: OrderedDict[TextBlock, None] = OrderedDict()
        # A root lives as long as a sequence or a block below it: a salt out of use leaves nothing behind.
        self._roots: WeakValueDictionary[bytes, TextBlock] = WeakValueDictionary()
        self.num_looked_up = 0  # blocks that were looked up so far one by one, not taken over from the latest walk
        self.latest: Walk | None = None  # as long as a sequence holds all of it

    @property
    def num_slots(self) -> int:
        return self.num_blocks * self.block_size

    @property
    def num_free_blocks(self) -> int:
        """Free and idle blocks, which ``take`` may use."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Slots in blocks that sequences hold."""
        return (self.num_blocks - self.num_free_blocks) * self.block_size

    def forget(self) -> None:
        """Evict all idle blocks."""
        while self._idle:
            self._free.append(self._evict())

    # The methods below are for SequenceCache alone.

    def root(self, salt: bytes) -> TextBlock:
        return self._roots.setdefault(salt, TextBlock())

    def take(self, num_blocks: int) -> list[int]:
        if num_blocks > self.num_free_blocks:
            raise PoolFullError(f"{num_blocks} KV blocks needed, {self.num_free_blocks} of {self.num_blocks} free")
        return [self._free.pop() if self._free else self._evict() for _ in range(num_blocks)]

    def give_back(self, block: int) -> None:
        """Free a block without remembered text."""
        self._free.append(block)

    def remember(self, parent: TextBlock, ids: bytes, block: int) -> TextBlock:
        """Remember the text ``ids`` of the taken ``block``, with which its sequence ends."""
        known = parent.add(ids, block)
        self.hold(known)
        covered = known.covered()
        if covered is not None and covered in self._idle:
            self._drop(covered)
        return known

    def disown(self, known: TextBlock) -> None:
        """Forget the text of a leaf that one sequence ends with, which keeps the block."""
        parent = known.parent
        assert parent is not None, "a root has no block"
        known.holders = 0
        self._ends(known)
        known.remove()
        self.let_go(parent)

    def hold(self, known: TextBlock) -> None:
        """A sequence ends with this block. The blocks before it are held too, up to one that is held already."""
        while known.parent is not None:
            known.holders += 1
            if known.holders > 1:
                return
            self._idle.pop(known, None)
            known = known.parent

    def let_go(self, known: TextBlock) -> None:
        """A sequence no longer ends with this block. Blocks that nothing holds any more become idle, the last first."""
        while known.parent is not None:
            known.holders -= 1
            if known.holders:
                return
            parent = known.parent
            self._ends(known)
            self._idle[known] = None
            if len(known.ids) < self.block_size * ID_BYTES and known.covering():
                self._drop(known)
            known = parent

    def _ends(self, known: TextBlock) -> None:
        if self.latest is not None and self.latest.path[-1] is known:
            self.latest = None

    def _drop(self, idle: TextBlock) -> None:
        del self._idle[idle]
        idle.remove()
        self._free.append(idle.block)

    def _evict(self) -> int:
        known, _ = self._idle.popitem(last=False)
        known.remove()
        return known.block


class SequenceCache:
    """The KV of one sequence: position i is in block ``block_table[i // block_size]``.

    The table begins with remembered blocks (``_path``: full, perhaps shared, never written again). The other blocks
    belong to this sequence alone; the first of them may be remembered as partial (``_tail``). The blocks of the rows
    in the present pass come last.
    """

    def __init__(self, pool: BlockPool, salt: bytes = b"") -> None:
        """``salt``: sequences with different salts never share blocks."""
        self.block_table: list[int] = []
        self._pool = pool
        self._size = pool.block_size
        self._root = pool.root(salt)
        self._path: list[TextBlock] = []
        self._tail: TextBlock | None = None
        self._length = 0
        self._num_behind = 0  # rows cached but not committed
        self._num_fed = 0  # rows of the present pass, after those

    def __len__(self) -> int:
        """Number of positions that are cached and committed."""
        return self._length

    def attach(self, ids: Sequence[int], max_blocks: int = sys.maxsize) -> list[Move]:
        """Reuse the remembered blocks of the text ``ids``, which includes the cached positions.

        Leaves at least one id to feed. Works on an empty cache, and on one that is remembered up to its last full
        block, for which another sequence may have computed the next block meanwhile. Does nothing on any other cache.
        If the pool is full, it attaches as much as possible. It stops after ``max_blocks``.
        """
        if len(self._path) < self._length // self._size:
            return []
        self._shrink(self._length)
        text, width = packed(ids[: len(ids) - 1]), self._size * ID_BYTES
        start, walk = len(self._path), self._pool.latest
        if walk is not None and (end := walk.beyond(self._root, self._path, text, width=width)):
            self._extend(walk.path[start:end], walk.blocks[start:end])
        if path := self._last_known.descend(text[len(self._path) * width :], width, max_blocks):
            self._pool.num_looked_up += len(path)
            self._extend(path, [known.block for known in path])
            self._pool.latest = Walk(self._root, text, path=self._path[:], blocks=self.block_table[:])
        return self._copy(text[len(self._path) * width :][:width]) if len(path) < max_blocks else []

    def _extend(self, path: list[TextBlock], blocks: list[int]) -> None:
        """Continue with remembered blocks instead of the partial block at the end."""
        self._drop_partial()
        self._pool.hold(path[-1])
        self._pool.let_go(self._last_known)
        self._path += path
        self.block_table += blocks
        self._length = len(self._path) * self._size

    def take(self, num_rows: int) -> list[int]:
        """Slots for the rows of the next pass, after the cached positions and the rows kept behind them.

        ``keep`` then decides which rows stay. Raises PoolFullError, without taking any block.
        """
        size, table = self._size, self.block_table
        start = self._length + self._num_behind
        end = start + num_rows
        missing = (end + size - 1) // size - len(table)
        if missing > 0:
            table.extend(self._pool.take(missing))
        self._num_fed = num_rows
        return [table[position // size] * size + position % size for position in range(start, end)]

    def keep(self, rows: Sequence[int], behind: Sequence[int] = ()) -> list[Move]:
        """Commit ``rows``, keep ``behind`` uncommitted after them, and give back the blocks of all other rows.

        Both index the rows after the cached positions: first those kept behind before, then those of the last pass.
        ``(*rows, *behind)`` increases. ``truncate``, ``attach`` and ``release`` drop the rows behind. Raises ValueError
        for a row that does not exist.
        """
        moves: list[Move] = []
        kept = (*rows, *behind)
        if kept:
            if kept[-1] >= self._num_behind + self._num_fed:
                raise ValueError(f"row {kept[-1]} of {self._num_behind + self._num_fed} fed cannot be kept")
            if kept[-1] >= len(kept):
                moves = [
                    Move(self._slot(self._length + row), self._slot(self._length + index))
                    for index, row in enumerate(kept)
                    if row != index
                ]
        self._length += len(rows)
        self._shrink(self._length + len(behind))
        self._num_behind = len(behind)
        return moves

    def truncate(self, length: int) -> None:
        """Drop every position from ``length`` on.

        If that cuts a block that other sequences hold, or with a remembered continuation, the whole block goes. Then
        the cache is up to ``block_size - 1`` positions shorter than ``length``, and these have to be fed again. Any
        other remembered block that is cut is forgotten and stays with this sequence.
        """
        if self._tail is not None and length < len(self._path) * self._size + len(self._tail.ids) // ID_BYTES:
            self._forget_tail()
        length = min(length, self._length)
        while len(self._path) > length // self._size:
            known = self._path.pop()
            self._shrink((len(self._path) + 1) * self._size)
            self._pool.hold(self._last_known)
            if known.holders == 1 and known.is_leaf:
                self._pool.disown(known)
            else:
                self._pool.let_go(known)
                self.block_table.pop()
                length = min(length, len(self._path) * self._size)
        self._length = length
        self._shrink(length)

    def remember(self, ids: Sequence[int]) -> None:
        """Remember ``ids``, the text of the cached positions or of the first of them, so that other sequences find it.

        If another sequence has computed the same text, its block replaces the block here. ``ids`` should be text that
        stays, without draft tokens.
        """
        size, length = self._size, min(len(ids), self._length)
        start = len(self._path) * size
        while start + size <= length:
            self._forget_tail()
            self._remember_block(packed(ids[start : start + size]))
            start += size
        if length > start + (len(self._tail.ids) // ID_BYTES if self._tail is not None else 0):
            self._forget_tail()
            block = self.block_table[len(self._path)]
            self._tail = self._pool.remember(self._last_known, packed(ids[start:length]), block)

    def release(self) -> None:
        """Give back all blocks, including those of a failed pass. Remembered blocks stay findable until evicted."""
        self._shrink((len(self._path) + (self._tail is not None)) * self._size)
        self._drop_partial()
        self._pool.let_go(self._last_known)
        self._path.clear()
        self.block_table.clear()
        self._length = 0

    def awaited(self, ids: Sequence[int]) -> Hashable | None:
        """A key of the next block that feeding the text ``ids`` would fill; equal keys mean equal blocks.

        None if the text ends in that block: waiting for another sequence to fill it would gain nothing.
        """
        start = len(self._path) * self._size
        if self._length >= start + self._size or len(ids) <= start + self._size:
            return None
        return self._last_known, packed(ids[start : start + self._size])

    @property
    def _last_known(self) -> TextBlock:
        return self._path[-1] if self._path else self._root

    def _slot(self, position: int) -> int:
        return self.block_table[position // self._size] * self._size + position % self._size

    def _shrink(self, length: int) -> None:
        """Give back blocks without a position below ``length``; none of them may be remembered."""
        num_blocks = (length + self._size - 1) // self._size
        self._num_behind = self._num_fed = 0
        while len(self.block_table) > num_blocks:
            self._pool.give_back(self.block_table.pop())

    def _remember_block(self, ids: bytes) -> None:
        """Remember the first block that is not remembered yet, which is full and holds ``ids``."""
        index, last = len(self._path), self._last_known
        known = last.find(ids)
        if known is None:
            known = self._pool.remember(last, ids, self.block_table[index])
        else:
            self._pool.hold(known)
            self._pool.give_back(self.block_table[index])
            self.block_table[index] = known.block
        self._pool.let_go(last)
        self._path.append(known)

    def _forget_tail(self) -> None:
        if self._tail is not None:
            self._pool.disown(self._tail)
            self._tail = None

    def _drop_partial(self) -> None:
        """Release the last block if it is partial. The caller sets the length."""
        if len(self.block_table) > len(self._path):
            block = self.block_table.pop()
            if self._tail is None:
                self._pool.give_back(block)
            else:
                self._pool.let_go(self._tail)
                self._tail = None

    def _copy(self, ids: bytes) -> list[Move]:
        """Extend the partial block at the end with rows of the remembered block that matches ``ids`` furthest."""
        num_rows = self._length - len(self._path) * self._size
        known, num_bytes = self._last_known.closest(ids)
        num_common = num_bytes // ID_BYTES
        if known is None or num_common <= num_rows:
            return []
        self._pool.hold(known)  # marks it as used, and prevents its eviction in favour of its copy
        if not num_rows and self._pool.num_free_blocks:
            self.block_table += self._pool.take(1)
        self._pool.let_go(known)
        if len(self.block_table) == len(self._path):
            return []
        source, target = known.block * self._size, self.block_table[-1] * self._size
        self._length += num_common - num_rows
        return [Move(source + offset, target + offset) for offset in range(num_rows, num_common)]
