"""How much of a text the KV cache shares, or will share, with other open sequences.

Knows the texts of the open sequences as they were opened, fed or not; does not know the cache. It counts as the cache
shares: full blocks with equal ids after equal text, under one salt, are held once. Sequences opened at the same moment
share, too: one feeds a block while the others wait for it (specdec.passes.prefill). The cache itself cannot tell this
in advance, because it knows only blocks that are full.

The texts are a radix tree: a node is a run of blocks, of which none but the last has several continuations. So a text
is found in a comparison or two, not block by block, which matters because opens are admitted between two passes.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

from specdec.core.sequence import SequenceSpec
from specdec.kvcache.prefix_index import ID_BYTES, num_equal, packed


class Run:
    """Blocks of text after those of ``above``. ``holders``: sequences of which it is the last."""

    __slots__ = ("__weakref__", "above", "below", "holders", "ids")

    def __init__(self, above: Run | None = None, ids: bytes = b"") -> None:
        self.above = above
        self.ids = ids
        self.below: dict[bytes, Run] = {}  # by their first block
        self.holders = 0


class SharedTexts:
    """The texts of the open sequences, in blocks of ``block_size`` ids; 0: nothing is shared."""

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._width = block_size * ID_BYTES
        self._num_bytes = 0
        # Its runs and its holders keep a root; without any it goes.
        self._roots: WeakValueDictionary[bytes, Run] = WeakValueDictionary()

    @property
    def num_ids(self) -> int:
        """Ids in full blocks; equal blocks count once."""
        return self._num_bytes // ID_BYTES

    def in_full_blocks(self, spec: SequenceSpec) -> int:
        """How many ids of ``spec`` can be shared."""
        return len(spec.token_ids) // self._size * self._size if self._size else 0

    def missing(self, spec: SequenceSpec) -> int:
        """How many of the shareable ids are in no open sequence."""
        if not self._size or (root := self._roots.get(spec.cache_salt)) is None:
            return self.in_full_blocks(spec)
        text = self._text(spec)
        _, start, inside = self._find(root, text)
        return (len(text) - start - inside) // ID_BYTES

    def add(self, spec: SequenceSpec) -> Run:
        """A sequence was opened. Returns its last run, which ``remove`` takes."""
        if (last := self._roots.get(spec.cache_salt)) is None:
            self._roots[spec.cache_salt] = last = Run()
        text = self._text(spec) if self._size else b""
        last, start, inside = self._find(last, text)
        if inside:
            last = self._split(last.below[text[start : start + self._width]], inside)
            start += inside
        if rest := text[start:]:
            above, last = last, Run(last, rest)
            above.below[rest[: self._width]] = last
            self._num_bytes += len(rest)
        last.holders += 1
        return last

    def remove(self, last: Run) -> None:
        """The sequence was closed."""
        last.holders -= 1
        while last.above is not None and not (last.holders or last.below):
            del last.above.below[last.ids[: self._width]]
            self._num_bytes -= len(last.ids)
            last = last.above

    def _text(self, spec: SequenceSpec) -> bytes:
        return packed(spec.token_ids[: self.in_full_blocks(spec)])

    def _find(self, run: Run, text: bytes) -> tuple[Run, int, int]:
        """The last run that ``text`` has in full, the bytes up to its end, and how many of the next run follow."""
        start = 0
        while (below := run.below.get(text[start : start + self._width])) is not None:
            equal = num_equal(below.ids, text[start : start + len(below.ids)], self._width)
            if equal < len(below.ids):
                return run, start, equal
            run, start = below, start + equal
        return run, start, 0

    def _split(self, run: Run, num_bytes: int) -> Run:
        """Part ``run`` in two, which hold the same text. Returns the new one, with the first ``num_bytes``."""
        assert run.above is not None, "a root has no text"
        first = Run(run.above, run.ids[:num_bytes])
        run.above.below[run.ids[: self._width]] = first
        run.above, run.ids = first, run.ids[num_bytes:]
        first.below[run.ids[: self._width]] = run
        return first
