"""Any history of the KV cache, against slots with contents.

Each slot of the reference holds what a model would have written there: the text up to that position, and its salt.
Moves are carried out as the model runner does it. Every position of every sequence always reads back its own text.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest

from specdec.kvcache.block_pool import BlockPool, Move, PoolFullError, SequenceCache

SALTS = (b"", b"other")
Content = tuple[bytes, tuple[int, ...]] | None


@dataclass(eq=False)
class Sample:
    cache: SequenceCache
    salt: bytes
    text: list[int] = field(default_factory=list)
    num_remembered: int = 0
    behind: list[Content] = field(default_factory=list)

    def slot(self, position: int, size: int) -> int:
        return self.cache.block_table[position // size] * size + position % size


class World:
    """A pool, the contents of its slots, and some sequences, which look up ``most_blocks`` at a time."""

    def __init__(self, num_blocks: int, size: int, most_blocks: int) -> None:
        self.most_blocks = most_blocks
        self.pool = BlockPool(num_blocks, size)
        self.size = size
        self.contents: list[Content] = [None] * self.pool.num_slots
        self.samples: list[Sample] = []
        self.num_fed = 0
        self.happened: Counter[str] = Counter()

    def open(self, salt: bytes) -> Sample:
        sample = Sample(SequenceCache(self.pool, salt), salt)
        self.samples.append(sample)
        return sample

    def attach(self, sample: Sample, more: Sequence[int]) -> None:
        """``more`` is text that the sequence has beyond what is cached."""
        ids = [*sample.text, *more]
        before, table = len(sample.cache), list(sample.cache.block_table)
        remembered = before // self.size * self.size <= sample.num_remembered
        live = max((self._in_common(other, sample, ids) for other in self.samples), default=0)
        room = bool(self.pool.num_free_blocks)
        num_moved = 0
        max_blocks, num_looked_up = self.most_blocks, self.most_blocks
        while num_looked_up == max_blocks:
            num_looked_up = -self.pool.num_looked_up
            moves = sample.cache.attach(ids, max_blocks)
            num_looked_up += self.pool.num_looked_up
            assert num_looked_up <= max_blocks
            num_moved += len(moves)
            self._carry_out(moves)
        after = len(sample.cache)
        assert after >= before
        if not remembered:
            assert (after, sample.cache.block_table) == (before, table)
            return
        assert after == before or after < len(ids)
        # What live sequences hold is found for certain; what idle blocks hold may be more.
        assert after >= (live if room else live // self.size * self.size)
        sample.text = ids[:after]
        sample.behind = []
        sample.num_remembered = max(sample.num_remembered, after // self.size * self.size)
        self.happened["attach"] += after > before
        self.happened["copy"] += bool(num_moved)

    def feed(
        self, sample: Sample, num_rows: int, kept: Sequence[int], ids: Sequence[int], behind: Sequence[int] = ()
    ) -> None:
        """Feed rows, of which, and of those behind the text, ``kept`` continue it with ``ids``."""
        length = len(sample.text)
        start = length + len(sample.behind)
        needed = -(-(start + num_rows) // self.size) - len(sample.cache.block_table)
        used, table = self.pool.num_used, list(sample.cache.block_table)
        if needed > self.pool.num_free_blocks:
            with pytest.raises(PoolFullError):
                sample.cache.take(num_rows)
            assert (self.pool.num_used, sample.cache.block_table) == (used, table)
            self.happened["full"] += 1
            return
        slots = sample.cache.take(num_rows)
        assert slots == [sample.slot(position, self.size) for position in range(start, start + num_rows)]
        assert not set(slots) & {slot for other in self.samples for slot in self._slots(other)}
        for slot in slots:
            self.num_fed += 1
            self.contents[slot] = (b"of a row that is not text", (self.num_fed,))
        rows = [sample.slot(position, self.size) for position in range(length, start + num_rows)]
        for place, row in enumerate(kept):
            self.contents[rows[row]] = (sample.salt, (*sample.text, *ids[: place + 1]))
        sample.behind = [self.contents[rows[row]] for row in behind]
        moves = sample.cache.keep(kept, behind)
        self._carry_out(moves)
        sample.text += ids
        self.happened["feed"] += 1
        self.happened["move"] += bool(moves)
        self.happened["behind"] += bool(behind)
        self.happened["text from behind"] += bool(kept) and kept[-1] < start - length

    def lose_pass(self, sample: Sample, num_rows: int) -> None:
        """Rows are written, but nothing is decided about them."""
        try:
            for slot in sample.cache.take(num_rows):
                self.contents[slot] = None
        except PoolFullError:
            return
        self.happened["lost"] += 1
        if num_rows % 2:
            sample.cache.keep((), range(len(sample.behind)))
        else:
            sample.cache.truncate(len(sample.text))
            sample.behind = []

    def truncate(self, sample: Sample, length: int) -> None:
        others = {block for other in self.samples if other is not sample for block in other.cache.block_table}
        free = self.pool.num_free_blocks
        cut = sample.cache.block_table[length // self.size] if length % self.size else -1
        sample.cache.truncate(length)
        if len(sample.cache) != length:
            assert len(sample.cache) == length // self.size * self.size
            assert cut not in sample.cache.block_table
            self.happened["cut whole"] += 1
        assert cut not in others or len(sample.cache) == length // self.size * self.size or cut == -1
        assert self.pool.num_free_blocks >= free
        del sample.text[len(sample.cache) :]
        sample.behind = []
        if length < sample.num_remembered:
            sample.num_remembered = min(sample.num_remembered, length) // self.size * self.size
        self.happened["truncate"] += 1

    def remember(self, sample: Sample, length: int) -> None:
        used = self.pool.num_used
        sample.cache.remember(sample.text[:length])
        sample.num_remembered = max(sample.num_remembered, length)
        self.happened["one for two"] += self.pool.num_used < used

    def release(self, sample: Sample) -> None:
        sample.cache.release()
        self.samples.remove(sample)
        assert (len(sample.cache), sample.cache.block_table) == (0, [])
        self.happened["release"] += 1

    def check(self) -> None:
        held: dict[int, tuple[int, Sample]] = {}
        for sample in self.samples:
            assert len(sample.cache) == len(sample.text)
            length = len(sample.text)
            assert len(sample.cache.block_table) == -(-(length + len(sample.behind)) // self.size)
            slots = self._slots(sample)
            for position, slot in enumerate(slots[:length]):
                assert self.contents[slot] == (sample.salt, tuple(sample.text[: position + 1]))
            assert [self.contents[slot] for slot in slots[length:]] == sample.behind
            for place, block in enumerate(sample.cache.block_table):
                # Shared are only full blocks that both remember, in the same place.
                if block in held:
                    other_place, other = held[block]
                    assert other_place == place
                    assert (place + 1) * self.size <= min(sample.num_remembered, other.num_remembered)
                held[block] = (place, sample)
        assert self.pool.num_used == len(held) * self.size
        assert self.pool.num_free_blocks == self.pool.num_blocks - len(held)
        self._check_awaited()

    def close(self) -> None:
        """When all is released the pool is as it was at the start."""
        for sample in list(self.samples):
            self.release(sample)
            self.check()
        assert self.pool.num_used == 0
        self.pool.forget()
        blank = SequenceCache(self.pool)
        assert sorted(blank.take(self.pool.num_slots)) == list(range(self.pool.num_slots))
        blank.release()
        for salt in SALTS:
            assert self.pool.root(salt).is_leaf

    def _check_awaited(self) -> None:
        """Two are awaiting the same block exactly if they have the same text up to its end."""
        keys = set()
        texts = set()
        for sample in self.samples:
            start = len(sample.text) // self.size * self.size
            ids = [*sample.text, *[0] * (self.size + 1)]
            awaited = sample.cache.awaited(ids)
            assert (awaited is None) == (start > sample.num_remembered)
            assert sample.cache.awaited(ids[: start + self.size]) is None
            if awaited is not None:
                text = (sample.salt, tuple(ids[: start + self.size]))
                assert (awaited in keys) == (text in texts)
                keys.add(awaited)
                texts.add(text)

    def _slots(self, sample: Sample) -> list[int]:
        return [sample.slot(position, self.size) for position in range(len(sample.text) + len(sample.behind))]

    def _in_common(self, other: Sample, sample: Sample, ids: list[int]) -> int:
        """How many positions of ``ids``, except the last, ``other`` has and remembers."""
        if other is sample or other.salt != sample.salt:
            return 0
        common = 0
        for one, two in zip(ids[:-1], other.text[: other.num_remembered], strict=False):
            if one != two:
                break
            common += 1
        return common

    def _carry_out(self, moves: Sequence[Move]) -> None:
        gathered = [self.contents[move.source] for move in moves]
        for move, content in zip(moves, gathered, strict=True):
            self.contents[move.target] = content


@pytest.mark.parametrize(("num_blocks", "size", "most_blocks"), [(12, 4, 99), (40, 2, 1), (40, 2, 3), (20, 8, 99)])
def test_a_long_history_of_many_sequences(num_blocks: int, size: int, most_blocks: int) -> None:
    """2,500 operations on one pool, weighted as a service would, with more sequences than there is room for."""
    chance = random.Random(num_blocks)
    world = World(num_blocks, size, most_blocks)

    def some_ids(at_most: int) -> list[int]:
        return [int(chance.random() < 0.2) for _ in range(chance.randint(0, at_most))]

    def step() -> None:
        verb = chance.choice(["open", "feed", "feed", "feed", "feed", "truncate", "truncate", "attach", "lost", "end"])
        if chance.random() < 0.01:
            world.pool.forget()
        if verb == "open" or not world.samples:
            world.attach(world.open(chance.choice(SALTS)), some_ids(6 * size))
            return
        sample = chance.choice(world.samples)
        if verb == "feed":
            num_rows = chance.randint(1, 10)
            total = len(sample.behind) + num_rows
            rows = sorted(chance.sample(range(total), chance.randint(1, total)))
            kept, behind = rows[: chance.randint(0, len(rows))], []
            if chance.random() < 0.5:
                behind = rows[len(kept) :]
            world.feed(sample, num_rows, kept, [int(chance.random() < 0.2) for _ in kept], behind)
            if chance.random() < 0.8:
                world.remember(sample, chance.randint(max(0, len(sample.text) - 3), len(sample.text)))
        elif verb == "truncate":
            world.truncate(sample, chance.randint(max(0, len(sample.text) - 6), len(sample.text)))
        elif verb == "attach":
            world.attach(sample, some_ids(6 * size))
        elif verb == "lost":
            world.lose_pass(sample, chance.randint(0, 10))
        else:
            world.release(sample)

    for _ in range(2_500):
        step()
        world.check()
    world.close()
    for event in ("attach", "copy", "feed", "move", "full", "lost", "truncate", "cut whole", "one for two"):
        assert world.happened[event], event
    assert world.happened["behind"] > world.happened["text from behind"] > 20
