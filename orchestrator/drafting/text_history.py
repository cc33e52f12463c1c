"""The texts of finished and running requests, searched by prompt lookup: what followed there is proposed in others.

Knows ids and the owner of each text, and shows a text to requests of the same owner alone: else the speed of an answer
would show what another owner's is. Does not know what a proposal is worth, and whether it is verified.

(Oliaro et al. 2024, "SuffixDecoding". Its suffix tree takes too long in Python. Like Deutsch 1996, RFC 1951, section 4,
this keeps hashes of the tokens before each position; a hash for each length instead of a chain bounds a search.)
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from specdec.speculation.prompt_lookup import LENGTHS, LONGEST, NO_ID, HitRates, agreement

_BLOCK = 16
"""Tokens that have one owner. A text fills whole blocks."""

_PORTION = 128
"""New tokens of a text that are written at a time: about a quarter of a millisecond."""

_MAX_AT_A_TIME = 2 * _PORTION

_MAX_COPIED = 64
"""Tokens after a place that was found. What follows them is found again."""


class TextHistory:
    """The latest ``num_tokens`` tokens of all owners, in a ring. 21 to 37 bytes each.

    A text is written in portions, each behind the LONGEST tokens before it. For each length of LENGTHS a table has the
    latest place after so many tokens, by their hash. A table forgets where hashes collide, and ids decide what agrees.
    """

    def __init__(self, num_tokens: int) -> None:
        self.rates = HitRates()  # of all proposals from here
        size = max(num_tokens, LONGEST + _MAX_AT_A_TIME + _BLOCK) // _BLOCK
        self._ids = array("I", [NO_ID]) * (size * _BLOCK)
        self._texts = [(b"", 0)] * size  # of each block: the owner, and where its text ends
        self._next = 0  # block
        num_slots = 1 << (len(self._ids) - 1).bit_length()
        self._tables = [(length, array("I", bytes(4 * num_slots))) for length in reversed(LENGTHS)]
        self._mask = num_slots - 1

    def write(self, owner: bytes, ids: Sequence[int], written: int, ended: bool = False) -> int:
        """Write the tokens of a text of ``owner`` from position ``written`` on, once they are a portion or the text has
        ``ended``. Returns the position up to which it is written then."""
        if len(ids) - written < (1 if ended else _PORTION):
            return written
        written = max(written, len(ids) - _MAX_AT_A_TIME)
        begin = max(0, written - LONGEST)
        text = array("I", ids[begin:])
        size = len(text) // _BLOCK + 1  # with an id at the end that no text has
        if self._next + size > len(self._texts):
            self._next = 0
        at = self._next * _BLOCK
        self._ids[at : at + size * _BLOCK] = text + array("I", [NO_ID]) * (size * _BLOCK - len(text))
        self._texts[self._next : self._next + size] = [(owner, at + len(text))] * size
        self._next += size
        printed, mask = text.tobytes(), self._mask
        for length, table in self._tables:
            width = 4 * length
            for index in range(max(length, written - begin), len(text)):
                table[hash(owner + printed[4 * index - width : 4 * index]) & mask] = at + index
        return len(ids)

    def find(self, owner: bytes, ids: Sequence[int], at_least: int) -> tuple[int, Sequence[int]]:
        """Where a text of ``owner`` agrees longest with the end of ``ids``, of several of LENGTHS the latest: how many
        tokens agree, and the text from the last of them on. 0: nowhere ``at_least`` so many."""
        end = array("I", ids[-LONGEST:]).tobytes()
        for length, table in self._tables:
            place = table[hash(owner + end[-4 * length :]) & self._mask] if len(end) >= 4 * length else 0
            of, ends = self._texts[place // _BLOCK]
            if of == owner and place < ends:
                agreed = agreement(self._ids, place, ids)
                if agreed >= max(length, at_least):
                    return agreed, self._ids[place - 1 : min(ends, place + _MAX_COPIED)]
        return 0, ()
