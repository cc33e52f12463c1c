"""Token ids -> text, as it may be shown: never half a character, never part of a stop string.

Knows one sample's output and what of it was handed out; refuses to know why tokens come.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

_PRIMING_TOKENS = 16
"""Prompt tokens the decoder sees first: some tokenizers write a word's leading space only after another word."""

_MOST_TOKENS_OF_A_CHARACTER = 4
"""The bytes of one in UTF-8, where each is a token."""

_MOST_PENDING = 64
"""Tokens in a row that end in no whole character: bytes that are none, or special tokens. The decoder looks at all of
them again with every token."""


class Origin(Enum):
    """Where a committed token came from."""

    DRAFT = "draft"
    CORRECTION = "correction"
    BONUS = "bonus"


@dataclass(frozen=True, slots=True)
class Piece:
    """Output that may be sent: text, and the ids all of whose text has now been handed out."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    origins: tuple[Origin, ...] = ()
    text_ends: tuple[int, ...] = ()  # where each id's text ends in the whole output, in characters

    def __bool__(self) -> bool:
        return bool(self.text or self.token_ids)


@dataclass(slots=True)
class _Held:
    token_id: int
    origin: Origin
    end: int | None  # where its text ends in the output; None: not yet a whole character


class Output:
    """One sample's output. Without a tokenizer it hands out ids alone."""

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0
    ) -> None:
        """In the text of the first ``min_tokens`` tokens no stop string is looked for."""
        self._tokenizer = tokenizer
        self._num_exempt_tokens = min_tokens
        self._num_exempt = 0  # characters
        self._decoder = _primed(tokenizer, prompt_ids) if tokenizer else None
        self._ids = list(prompt_ids[-_PRIMING_TOKENS - _MOST_TOKENS_OF_A_CHARACTER :])
        self._stop = tuple(stop)
        self._text = ""
        self._num_sent = 0  # characters
        self._num_pending = 0  # tokens since the last that ended in a whole character
        self._held: list[_Held] = []

    def push(self, token_id: int, origin: Origin) -> str | None:
        """Append a committed token. The stop string it completes, if any: nothing may be pushed after that."""
        text = self._decoded(token_id)
        before = len(self._text)
        self._ids.append(token_id)
        self._text += text
        self._held.append(_Held(token_id, origin, None))
        self._num_pending = 0 if text else self._num_pending + 1
        if self._tokenizer is not None and self._num_pending == _MOST_PENDING:
            # They have no text; it goes on as if they were not there.
            self._decoder = _primed(self._tokenizer, self._ids[:-_MOST_PENDING])
            self._num_pending = 0
        if not self._num_pending or self._decoder is None:
            for held in self._held:
                held.end = held.end if held.end is not None else len(self._text)
        if self._num_exempt_tokens:
            self._num_exempt_tokens -= 1
            self._num_exempt = len(self._text)
        return self._cut_at_stop(before)

    def finish(self) -> str | None:
        """No token follows: of a last token that ends in half a character, the whole ones before that are text too.
        The half one is dropped, though not its ids. The stop string that is complete now, if any."""
        num_pending = sum(held.end is None for held in self._held)
        if self._tokenizer is None or not num_pending:
            return None
        context = _tail(self._tokenizer, self._ids[:-num_pending])
        shown = self._tokenizer.decode(context)
        text = self._tokenizer.decode([*context, *self._ids[-num_pending:]])
        before = len(self._text)
        if text.startswith(shown):
            self._text += text[len(shown) :].rstrip("\ufffd")
        return self._cut_at_stop(before)

    def _decoded(self, token_id: int) -> str:
        """The text that became whole with this token."""
        if self._decoder is None or self._tokenizer is None:
            return ""
        try:
            return self._decoder.step(self._tokenizer, token_id) or ""
        except Exception:  # the only class that tokenizers raises
            # Byte tokens that are not UTF-8 would change text before them, which was handed out: it stays, and the
            # decoder starts afresh with the tokens that have no text yet.
            self._decoder = DecodeStream(skip_special_tokens=True)
            pending = [held.token_id for held in self._held if held.end is None]
            return "".join(self._decoder.step(self._tokenizer, each) or "" for each in [*pending, token_id])

    def _cut_at_stop(self, before: int) -> str | None:
        found = []
        for stop in self._stop:
            start = self._text.find(stop, max(self._num_exempt, before - len(stop) + 1))
            if start >= 0:
                found.append((start, stop))
        if not found:
            return None
        start, stop = min(found)
        self._text = self._text[:start]
        self._held = [held for held in self._held if held.end is not None and held.end <= start]
        return stop

    def skip(self) -> None:
        """What was pushed so far is with the client already."""
        self._held, self._num_sent = [], len(self._text)

    def take(self, finished: bool = False) -> Piece:
        """What may be sent now; everything that is left if no token follows.

        Text goes out token by token, together with the ids, so that whoever has the ids knows which text came.
        """
        num_whole, end = len(self._held), len(self._text)
        if not finished:
            safe = len(self._text) - self._num_suspicious()
            num_whole = sum(held.end is not None and held.end <= safe for held in self._held)
            end = max([self._num_sent, *(held.end or 0 for held in self._held[:num_whole])])
        whole, self._held = self._held[:num_whole], self._held[num_whole:]
        text, self._num_sent = self._text[self._num_sent : end], end
        return Piece(
            text,
            tuple(held.token_id for held in whole),
            tuple(held.origin for held in whole),
            tuple(len(self._text) if held.end is None else held.end for held in whole),
        )

    def _num_suspicious(self) -> int:
        """Length of the longest tail that may be the beginning of a stop string."""
        longest, last = 0, self._text[-1:]
        num_searched = len(self._text) - self._num_exempt
        for stop in self._stop:
            length = min(len(stop) - 1, num_searched)
            # Of its beginnings those that end as the text does, the longest first.
            while length > longest and (length := stop.rfind(last, longest, length) + 1) > longest:
                if self._text.endswith(stop[:length]):
                    longest = length
                length -= 1
        return longest


def _tail(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """The last ids, but not from the middle of a character on: what follows such a tail would lose its space."""
    tails = (list(ids[-_PRIMING_TOKENS - more :]) for more in range(_MOST_TOKENS_OF_A_CHARACTER))
    # From its beginning on a text is whole, whatever it looks like.
    whole = (each for each in tails if len(each) == len(ids) or not tokenizer.decode(each).startswith("\ufffd"))
    return next(whole, [])


def _primed(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> DecodeStream:
    tail = _tail(tokenizer, prompt_ids)
    # After half a character the decoder would hand out part of the prompt.
    if tokenizer.decode(tail).endswith("\ufffd"):
        tail = []
    return DecodeStream(ids=tail, skip_special_tokens=True)
