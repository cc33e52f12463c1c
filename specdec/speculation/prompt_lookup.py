"""Prompt lookup, a drafter: where the text repeats itself or another, what followed the last time is proposed.

Knows the ids of one sequence, and how often such proposals came true; does not know what a round costs, what else could
be verified, and how other texts are kept. Every proposal is compared with what was committed, verified or not, so
nothing has to be tried to know its worth. (Saxena 2023, "Prompt Lookup Decoding".)
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect
from collections.abc import Sequence
from typing import Protocol

from specdec.core.limits import MAX_DRAFT_TOKENS
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.speculation.acceptance import AcceptanceRate

_SHORTEST, LONGEST = 2, 16
"""Tokens that must agree for a proposal, and beyond which more make no difference. After two, the next is right in
0.4 of the cases in program text. Lengths are measured apart, so short ones spoil nothing."""

LENGTHS = (3, 4, 8, 16)
_PRIORS = (0.2, 0.3, 0.5, 0.7, 0.8)
"""Shares of right tokens by the length of the agreement (2, 3, from 4, 8, 16) before any measurement. Low, so that a
text that does not repeat itself gets no proposals."""

_PRIOR_TRIALS = 6
_MEMORY, _MEMORY_OF_ALL = 100, 500

_MIN_CHANCE = 0.1
"""Less likely tokens are not proposed, however cheap a row is."""

_WINDOW = 16_384
"""The latest tokens, which are searched."""

_MAX_CANDIDATES = 24
_MAX_PAUSE = 4
"""Tokens between two searches after many that found nothing: a repetition is seen as well a little later."""

_PREDICTED = 8
"""The agreement before a prediction, for its chances."""

NO_ID = (1 << 32) - 1

_LOW_BYTE = 0 if sys.byteorder == "little" else 3


class HitRates:
    """The share of right next tokens, by the length of the agreement before them. ``of_all`` is the prior."""

    def __init__(self, of_all: HitRates | None = None) -> None:
        self._of_all = of_all
        if of_all is None:
            self._by_length = [AcceptanceRate(_MEMORY_OF_ALL, prior, _PRIOR_TRIALS) for prior in _PRIORS]
        else:
            self._by_length = [AcceptanceRate(_MEMORY) for _ in _PRIORS]

    def count_token(self, num_agreed: int, right: bool) -> None:
        """After ``num_agreed`` tokens."""
        self._by_length[bisect(LENGTHS, num_agreed)].observe(right, 1)
        if self._of_all is not None:
            self._of_all.count_token(num_agreed, right)

    def after(self, num_agreed: int) -> float:
        """The chance that the next token is right."""
        length = bisect(LENGTHS, num_agreed)
        if self._of_all is None:
            return self._by_length[length].share()
        return self._by_length[length].share(self._of_all.after(num_agreed), _PRIOR_TRIALS)


class OtherTexts(Protocol):
    """See orchestrator.drafting.text_history."""

    rates: HitRates

    def find(self, owner: bytes, ids: Sequence[int], at_least: int) -> tuple[int, Sequence[int]]: ...


class PromptLookup:
    """The lookup of one sequence, of which the tokens must not depend on proposals (greedy and coupled sampling).

    A proposal continues as long as it comes true, so most rounds do not search. ``prediction``: ids that the output is
    expected to repeat. They are searched as if they stood before the prompt, and are the first proposal. ``others``:
    where to search for a longer agreement, in the texts of ``owner``.
    """

    def __init__(
        self, of_all: HitRates, prediction: Sequence[int] = (), others: OtherTexts | None = None, owner: bytes = b""
    ) -> None:
        self._others, self._owner = others, owner
        self._of_own = self._rates = HitRates(of_all)
        self._of_others = HitRates(others.rates) if others else self._of_own
        # Position 0 stands for no proposal.
        self._predicted = array("I", [NO_ID, *prediction] if prediction else [])
        self._num_predicted = len(prediction)
        self._copied: Sequence[int] = ()  # a part of another text, if that is what is proposed from
        self._past: Sequence[int] = ()  # what is proposed from
        self._prints = bytearray()
        self._source = 0  # position of the next proposed token there; 0: none
        self._agreed = 0  # length of the agreement before it
        self._num_missed = 0  # searches in a row
        self._search_at = 0  # length of the text at the next search
        self._num_known = 0  # ids of the text that stand behind the prediction

    def chances(self, ids: Sequence[int]) -> list[float]:
        """Probabilities that the next 1, 2, ... tokens after ``ids`` are all proposed right, MAX_DRAFT_TOKENS at most;
        empty: no proposal. ``ids`` only ever grow."""
        if self._predicted:
            first = not self._num_known
            self._predicted.extend(ids[self._num_known :])
            self._num_known = len(ids)
            self._score(self._predicted)
            if first:
                self._source, self._agreed = 1, _PREDICTED
            ids = self._predicted
        else:
            self._score(ids)
        if not self._source:
            self._search(ids)
        return self._chain() if self._source else []

    @property
    def in_text(self) -> bool:
        """Whether the last ``chances`` are of the text itself, neither of another one nor of the prediction."""
        return self._source > self._num_predicted and not self._copied

    def propose(self, num_tokens: int) -> TokenTree:
        """A chain of ``num_tokens`` of the tokens that the last ``chances`` were about."""
        past = list(self._past[self._source : self._source + num_tokens])
        # A proposal that reaches the end of the text repeats itself.
        return TokenTree.chain((past * (1 + num_tokens // len(past)))[:num_tokens]) if past else EMPTY_TREE

    def doubtful(self, num_tokens: int) -> bool:
        """Whether a proposal of so many tokens more likely has a wrong one."""
        return bool(self._source) and self._chain()[num_tokens - 1] < 0.5

    def _score(self, ids: Sequence[int]) -> None:
        """Compare the proposal with the new tokens."""
        if not self._prints:
            self._prints = bytearray(max(0, len(ids) - _WINDOW))  # what is before is never searched
        seen = len(self._prints)
        past = self._past = self._copied or ids
        self._prints += _fingerprints(ids[seen:])
        for position in range(seen, len(ids)):
            if not self._source:
                break
            right = past[self._source] == ids[position]
            self._rates.count_token(self._agreed, right)
            self._source += 1
            self._agreed += 1
            if not right or self._source == len(self._copied):
                self._source = self._num_missed = self._search_at = 0

    def _search(self, ids: Sequence[int]) -> None:
        """Find the longest earlier occurrence of the text's end, of several the latest, in one walk from the end. Other
        texts are asked for a longer one, which is taken if such have come true as often."""
        size = len(ids)
        if size < self._search_at or size <= _SHORTEST:
            return
        start, end, wanted = max(0, size - _WINDOW), size - 1, _SHORTEST
        for _ in range(_MAX_CANDIDATES):
            match = self._prints.rfind(self._prints[size - wanted :], start, end)
            if match < 0:
                break
            end = match + wanted
            agreed = agreement(ids, end, ids)
            if agreed >= wanted:
                self._source, self._agreed, wanted = end, agreed, agreed + 1
                if agreed >= LONGEST or wanted > size:
                    break
            end -= 1
        self._rates, self._copied, self._past = self._of_own, (), ids
        if self._others and wanted <= LONGEST:
            agreed, copied = self._others.find(self._owner, ids, wanted)
            if agreed and (not self._source or self._of_others.after(agreed) >= self._of_own.after(self._agreed)):
                self._source, self._agreed = 1, agreed
                self._rates, self._copied, self._past = self._of_others, copied, copied
        if self._source:
            self._num_missed = 0
        else:
            self._num_missed += 1
            self._search_at = size + min(self._num_missed // 4, _MAX_PAUSE)

    def _chain(self) -> list[float]:
        rates = [self._rates.after(length) for length in (_SHORTEST, *LENGTHS)]
        chances, chance = [], 1.0
        num_there = len(self._copied) - self._source if self._copied else MAX_DRAFT_TOKENS
        for agreed in range(self._agreed, self._agreed + min(MAX_DRAFT_TOKENS, num_there)):
            chance *= rates[bisect(LENGTHS, agreed)]
            if chance < _MIN_CHANCE:
                break
            chances.append(chance)
        return chances


def _fingerprints(ids: Sequence[int]) -> bytes:
    """A byte of each id, so that a search is one call. In three calls, since a long text has thousands of ids."""
    return array("I", ids).tobytes()[_LOW_BYTE::4]


def agreement(past: Sequence[int], end: int, ids: Sequence[int]) -> int:
    """The number of tokens of ``past`` before position ``end`` that equal those at the end of ``ids``, at most LONGEST
    and no more than ``ids`` has."""
    max_length = min(end, len(ids), LONGEST)
    for length in range(max_length):
        if past[end - 1 - length] != ids[-1 - length]:
            return length
    return max_length
