"""Token ids -> text that may be sent: never half a character, never part of a stop string.

Knows one sample's output and how much of it was sent; does not know where tokens come from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from specdec.core.rounds import Logprobs

_PRIMING_TOKENS = 16
"""Prompt tokens that the decoder sees first: some tokenizers write a word's leading space only after another word."""

_MAX_TOKENS_PER_CHARACTER = 4
"""A character has at most four bytes in UTF-8, and each may be a token."""

_MAX_PENDING = 64
"""Tokens in a row without a whole character (invalid bytes or special tokens), after which the decoder restarts. It
decodes all pending tokens again with every token."""


class Origin(Enum):
    """Where a committed token came from."""

    DRAFT = "draft"
    CORRECTION = "correction"
    BONUS = "bonus"
    LOOKUP = "lookup"


@dataclass(frozen=True, slots=True)
class Piece:
    """Output that may be sent: text, and the ids that have no unsent text any more."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    origins: tuple[Origin, ...] = ()
    text_ends: tuple[int, ...] = ()  # where each id's text ends in the whole output, in characters
    logprobs: Logprobs | None = None  # of the ids, if requested

    def __bool__(self) -> bool:
        return bool(self.text or self.token_ids)


@dataclass(slots=True)
class _Held:
    token_id: int
    origin: Origin
    end: int | None  # where its text ends in the output, in characters; None: not yet a whole character
    logprobs: Logprobs | None


class Output:
    """One sample's output. Without a tokenizer it has ids only."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt_ids: Sequence[int] = (),
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """The text of the first ``min_tokens`` tokens is not searched for stop strings. ``include_stop``: the one that
        ends the output is a part of it."""
        self._tokenizer = tokenizer
        self._include_stop = include_stop
        self._skip = skip_special_tokens
        self._num_exempt_tokens = min_tokens
        self._num_exempt = 0  # characters
        self._decoder: DecodeStream | None = None
        self._shown = ""  # what the decoder's first text begins with, and the prompt has
        if tokenizer is not None:
            self._decoder, self._shown = _primed(tokenizer, prompt_ids, self._skip)
        self._ids = list(prompt_ids[-_PRIMING_TOKENS - _MAX_TOKENS_PER_CHARACTER :])
        self._stop = tuple(stop)
        self._reach = max(map(len, self._stop), default=0)
        self._text = ""  # without what was sent and no stop string can reach: a copy per token must not grow
        self._num_dropped = 0  # characters before it
        self._num_sent = 0  # characters
        self._num_pending = 0  # tokens since the last whole character
        self._held: list[_Held] = []

    def push(self, token_id: int, origin: Origin, logprobs: Logprobs | None = None) -> str | None:
        """Append a committed token. Returns the stop string that it completes; after one, nothing may be pushed."""
        text = self._decoded(token_id)
        before = self._length
        self._ids.append(token_id)
        self._text += text
        self._held.append(_Held(token_id, origin, end=None, logprobs=logprobs))
        self._num_pending = 0 if text else self._num_pending + 1
        if self._tokenizer is not None and self._num_pending == _MAX_PENDING:
            # The pending tokens have no text: the decoder continues from the tokens before them.
            self._decoder, self._shown = _primed(self._tokenizer, self._ids[:-_MAX_PENDING], self._skip)
            self._num_pending = 0
        if not self._num_pending or self._decoder is None:
            for held in self._held:
                held.end = held.end if held.end is not None else self._length
        if self._num_exempt_tokens:
            self._num_exempt_tokens -= 1
            self._num_exempt = self._length
        return self._cut_at_stop(before)

    @property
    def _length(self) -> int:
        return self._num_dropped + len(self._text)

    def finish(self) -> str | None:
        """No token follows: decode the pending tokens. Their whole characters become text; a half one at the end is
        dropped, but its ids stay. Returns the stop string that this completes, if any."""
        num_pending = sum(held.end is None for held in self._held)
        if self._tokenizer is None or not num_pending:
            return None
        context = _tail(self._tokenizer, self._ids[:-num_pending])
        shown = self._tokenizer.decode(context, skip_special_tokens=self._skip)
        text = self._tokenizer.decode([*context, *self._ids[-num_pending:]], skip_special_tokens=self._skip)
        before = self._length
        if text.startswith(shown):
            self._text += text[len(shown) :].rstrip("\ufffd")
        return self._cut_at_stop(before)

    def _decoded(self, token_id: int) -> str:
        """The text that this token completes."""
        if self._decoder is None or self._tokenizer is None:
            return ""
        try:
            text = self._decoder.step(self._tokenizer, token_id) or ""
            if not text:
                return ""
            if text.startswith(self._shown):
                shown, self._shown = self._shown, ""
                return text[len(shown) :]
        except Exception:  # the only class that tokenizers raises
            pass
        # Byte tokens that are not UTF-8 would change earlier text, which may be sent already, and others end a
        # character that the prompt begins. That text stays, and a new decoder starts with the tokens that have no text.
        self._decoder, self._shown = DecodeStream(skip_special_tokens=self._skip), ""
        pending = [held.token_id for held in self._held if held.end is None]
        return "".join(self._decoder.step(self._tokenizer, pending_id) or "" for pending_id in [*pending, token_id])

    def _cut_at_stop(self, before: int) -> str | None:
        matches = []
        for stop in self._stop:
            start = max(self._num_exempt, before - len(stop) + 1) - self._num_dropped
            if (start := self._text.find(stop, max(0, start))) >= 0:
                matches.append((self._num_dropped + start, stop))
        if not matches:
            return None
        start, stop = min(matches)
        if self._include_stop:  # with the token that completes it
            start += len(stop)
            for held in self._held:
                held.end = start if held.end is None else min(held.end, start)
        self._text = self._text[: start - self._num_dropped]
        self._held = [held for held in self._held if held.end is not None and held.end <= start]
        return stop

    def skip(self) -> None:
        """Mark the output so far as sent: the client has it already."""
        self._held, self._num_sent = [], self._length
        self._drop()

    def _drop(self) -> None:
        kept_from = max(self._num_dropped, min(self._num_sent, self._length - self._reach))
        self._text, self._num_dropped = self._text[kept_from - self._num_dropped :], kept_from

    def release(self, finished: bool = False) -> Piece:
        """The output that may be sent now; all that is left if no token follows.

        Text is sent with the ids it belongs to, so that a client with the ids knows which text it has.
        """
        num_whole, end = len(self._held), self._length
        if not finished:
            safe = self._length - self._num_suspicious()
            num_whole = sum(held.end is not None and held.end <= safe for held in self._held)
            end = max([self._num_sent, *(held.end or 0 for held in self._held[:num_whole])])
        whole, self._held = self._held[:num_whole], self._held[num_whole:]
        text = self._text[self._num_sent - self._num_dropped : end - self._num_dropped]
        self._num_sent = end
        self._drop()
        return Piece(
            text=text,
            token_ids=tuple(held.token_id for held in whole),
            origins=tuple(held.origin for held in whole),
            text_ends=tuple(self._length if held.end is None else held.end for held in whole),
            logprobs=_joined(whole),
        )

    def _num_suspicious(self) -> int:
        """Length of the longest tail that may be the start of a stop string."""
        longest, last = 0, self._text[-1:]
        num_searched = self._length - self._num_exempt
        for stop in self._stop:
            length = min(len(stop) - 1, num_searched)
            # Try the prefixes of the stop string with the text's last character at their end, the longest first.
            while length > longest and (length := stop.rfind(last, longest, length) + 1) > longest:
                if self._text.endswith(stop[:length]):
                    longest = length
                length -= 1
        return longest


def pieces_of(
    tokenizer: Tokenizer | None, ids: Sequence[int], *, skip_special_tokens: bool, num_ids: int
) -> Iterator[Piece]:
    """A whole text, such as a prompt, in pieces of about ``num_ids``."""
    output = Output(tokenizer, skip_special_tokens=skip_special_tokens)
    for start in range(0, len(ids), num_ids):
        for token_id in ids[start : start + num_ids]:
            output.push(token_id, Origin.BONUS)
        ends = start + num_ids >= len(ids)
        if ends:
            output.finish()
        yield output.release(ends)


def _joined(held: Sequence[_Held]) -> Logprobs | None:
    parts = [token.logprobs for token in held if token.logprobs is not None]
    return Logprobs.joined(parts) if parts else None


def _tail(tokenizer: Tokenizer, ids: Sequence[int]) -> list[int]:
    """The last ids, not starting within a character: text decoded after such a tail would lose its space. A character
    that is cut counts for at least one of U+FFFD, which a text may also have itself."""
    tails = (list(ids[-_PRIMING_TOKENS - more :]) for more in range(_MAX_TOKENS_PER_CHARACTER))
    return min(tails, key=lambda tail: tokenizer.decode(tail).count("\ufffd"))


def _primed(tokenizer: Tokenizer, prompt_ids: Sequence[int], skip_special_tokens: bool) -> tuple[DecodeStream, str]:
    """A decoder of what follows, and the part of the prompt that its first text begins with."""
    tail = _tail(tokenizer, prompt_ids)
    text = tokenizer.decode(tail, skip_special_tokens=skip_special_tokens)
    return DecodeStream(ids=tail, skip_special_tokens=skip_special_tokens), text if text.endswith("\ufffd") else ""
