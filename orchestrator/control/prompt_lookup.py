"""Prompt lookup: where the text repeats itself, what followed the last time is the guess.

Knows the ids of one sequence, and how often guesses of this kind came true; refuses to know what a round costs and
what else could be verified. (Saxena 2023, "Prompt Lookup Decoding"; here every guess is compared with what was
committed, whether it was verified or not, so that nothing has to be tried to know what it is worth.)
"""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence

from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.speculation.acceptance import AcceptanceRate

MOST_GUESSED = 16
"""Tokens of one guess."""

_SHORTEST, _LONGEST = 2, 16
"""Tokens that must have come before, and those beyond which it makes no difference. After two the next is right in 0.4
of the cases in program text, which pays where rows are free; lengths are measured apart, so they spoil nothing."""

_LENGTHS = (3, 4, 8, 16)
_PRIORS = (0.2, 0.3, 0.5, 0.7, 0.8)
"""By the length of the agreement (2, 3, from 4 on, from 8 on, from 16 on), before anything is known. Low, so that a
text that does not repeat itself is left alone."""

_PRIOR_TRIALS = 6
_MEMORY, _MEMORY_OF_ALL = 100, 500

_LEAST_CHANCE = 0.1
"""Less likely tokens are not guessed, however little a row costs."""

_WINDOW = 16_384
"""Tokens that are searched, the latest."""

_MOST_CANDIDATES = 24
_LONGEST_REST = 4
"""Tokens between two searches, once many found nothing: a repetition is seen as well a little later."""

_PRINT = 251
"""A token's fingerprint is its id modulo this prime: a byte, so that a search is one call."""


class HitRates:
    """How often the next token of a guess is right, by how many tokens agreed before it. ``of_all`` is the prior."""

    def __init__(self, of_all: HitRates | None = None) -> None:
        self._of_all = of_all
        if of_all is None:
            self._by_length = [AcceptanceRate(_MEMORY_OF_ALL, prior, _PRIOR_TRIALS) for prior in _PRIORS]
        else:
            self._by_length = [AcceptanceRate(_MEMORY) for _ in _PRIORS]

    def observe(self, num_agreed: int, right: bool) -> None:
        """After ``num_agreed`` tokens."""
        self._by_length[bisect(_LENGTHS, num_agreed)].observe(right, 1)
        if self._of_all is not None:
            self._of_all.observe(num_agreed, right)

    def after(self, num_agreed: int) -> float:
        """The chance that the next token is right."""
        length = bisect(_LENGTHS, num_agreed)
        if self._of_all is None:
            return self._by_length[length].share()
        return self._by_length[length].share(self._of_all.after(num_agreed), _PRIOR_TRIALS)


class PromptLookup:
    """Of one sequence, whose tokens must be the target's own whatever is proposed (greedy and coupled sampling).

    A guess goes on for as long as it comes true, so most rounds search for nothing.
    """

    def __init__(self, of_all: HitRates) -> None:
        self._rates = HitRates(of_all)
        self._ids: Sequence[int] = ()
        self._prints = bytearray()
        self._source = 0  # where the next token of the guess is; 0: there is none
        self._agreed = 0  # tokens up to there that are the same as those up to the end
        self._num_missed = 0  # searches in a row
        self._search_at = 0  # not before the text is so long

    def look(self, ids: Sequence[int]) -> list[float]:
        """``ids`` are all there are, those of before and maybe more. The chances that the next 1, 2, ... tokens can
        all be guessed, at most MOST_GUESSED; empty: there is no guess."""
        self._score(ids)
        if not self._source:
            self._search(ids)
        return self._chain() if self._source else []

    def guess(self, num_tokens: int) -> TokenTree:
        """So many of the tokens that ``look`` told the chances of, as a chain."""
        past = list(self._ids[self._source : self._source + num_tokens])
        # What was guessed goes on like what it was guessed from.
        return TokenTree.chain((past * (1 + num_tokens // len(past)))[:num_tokens]) if past else EMPTY_TREE

    def _score(self, ids: Sequence[int]) -> None:
        """Compare what was guessed with what came."""
        if not self._prints:
            self._prints = bytearray(max(0, len(ids) - _WINDOW))  # what lies before is never searched
        seen = len(self._prints)
        self._ids = ids
        self._prints += bytes([token_id % _PRINT for token_id in ids[seen:]])
        for position in range(seen, len(ids)):
            if not self._source:
                break
            right = ids[self._source] == ids[position]
            self._rates.observe(self._agreed, right)
            if right:
                self._source += 1
                self._agreed += 1
            else:
                self._source = self._num_missed = self._search_at = 0

    def _search(self, ids: Sequence[int]) -> None:
        """The longest earlier occurrence of the text's end, and of those the latest: one walk from the end."""
        size = len(ids)
        if size < self._search_at or size <= _SHORTEST:
            return
        start, end, wanted = max(0, size - _WINDOW), size - 1, _SHORTEST
        for _ in range(_MOST_CANDIDATES):
            found = self._prints.rfind(self._prints[size - wanted :], start, end)
            if found < 0:
                break
            end = found + wanted
            agreed = _agreement(ids, end)
            if agreed >= wanted:
                self._source, self._agreed, wanted = end, agreed, agreed + 1
                if agreed >= _LONGEST or wanted > size:
                    break
            end -= 1
        if self._source:
            self._num_missed = 0
        else:
            self._num_missed += 1
            self._search_at = size + min(self._num_missed // 4, _LONGEST_REST)

    def _chain(self) -> list[float]:
        rates = [self._rates.after(length) for length in (_SHORTEST, *_LENGTHS)]
        chances, chance = [], 1.0
        for agreed in range(self._agreed, self._agreed + MOST_GUESSED):
            chance *= rates[bisect(_LENGTHS, agreed)]
            if chance < _LEAST_CHANCE:
                break
            chances.append(chance)
        return chances


def _agreement(ids: Sequence[int], end: int) -> int:
    """How many tokens before position ``end`` are those before the end of ``ids``, as far as _LONGEST."""
    most = min(end, _LONGEST)
    for length in range(most):
        if ids[end - 1 - length] != ids[-1 - length]:
            return length
    return most
