"""A text that comes in pieces. What reads it is a generator, which yields where it needs more text: so how the text is
cut changes nothing. Does not know what is read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]
Write = Callable[[str], object]

_SPACE = re.compile(r"\s+")
MAX_SPACES = 64
"""Between two tags, and before the first one."""
_MAX_WORD = 400


class Source:
    """Up to where it was taken."""

    def __init__(self) -> None:
        self._text, self._at, self._end = "", 0, 0
        self._is_finished = False
        self._tags: tuple[str, str] | None = None
        self._kept: list[str] | None = None
        self.is_last = False
        """Nothing follows what is there."""
        self.is_closed = False
        """Since a tag closes it."""

    def add(self, text: str) -> None:
        self._text, self._at = self._text[self._at :] + text, 0
        self._bound()

    def finish(self) -> None:
        self._is_finished = True
        self._bound()

    def bound(self, tags: tuple[str, str] | None) -> None:
        """The text ends at a closing tag that an opening one or the end follows: (opening, closing). None: no longer.

        So a string that is not closed takes no further calls in."""
        self._tags = tags
        self._bound()

    def _bound(self) -> None:
        self._end, self.is_last, self.is_closed = len(self._text), self._is_finished, False
        if self._tags is None:
            return
        opening, closing = self._tags
        index = self._text.find(closing, self._at)
        while index >= 0:
            behind = index + len(closing)
            is_short = len(self._text) < behind + MAX_SPACES
            rest = self._text[behind : behind + MAX_SPACES].lstrip()
            if rest.startswith(opening) or (is_short and self._is_finished and not rest):
                self._end, self.is_last, self.is_closed = index, True, True
                return
            if opening.startswith(rest) and is_short and not self._is_finished:
                self._end = index
                return
            index = self._text.find(closing, index + 1)
        if not self._is_finished:
            self._end -= held_length(self._text[self._at :], closing)

    def keep(self) -> None:
        """What is taken from here on, unless it is kept already."""
        self._kept = self._kept or []

    def kept(self) -> str:
        kept, self._kept = "".join(self._kept or ()), None
        return kept

    def take(self, length: int) -> str:
        taken = self._text[self._at : self._at + length]
        self._at += length
        if self._kept is not None:
            self._kept.append(taken)
        return taken

    def take_run(self, pattern: re.Pattern[str]) -> str:
        """What is there of a run of characters."""
        match = pattern.match(self._text, self._at, self._end)
        return self.take(match.end() - self._at) if match else ""

    def has(self, length: int) -> Reading[bool]:
        while self._end - self._at < length and not self.is_last:
            yield
        return self._end - self._at >= length

    def next(self, length: int = 1) -> Reading[str]:
        """The next characters, which are not taken; fewer at the end."""
        yield from self.has(length)
        return self._text[self._at : min(self._end, self._at + length)]

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Likewise all of a run of characters; "" if the end cuts it off, or it is too long."""
        while True:
            match = pattern.match(self._text, self._at, self._end)
            length = match.end() - self._at if match else 0
            if self._at + length < self._end or length > _MAX_WORD:
                return match[0] if match and length <= _MAX_WORD else ""
            if self.is_last:
                return ""
            yield

    def skip(self, pattern: re.Pattern[str] = _SPACE) -> Reading[None]:
        while (yield from self.has(1)) and self.take_run(pattern):
            pass

    def starts(self, *signs: str) -> Reading[str]:
        """The first of the signs with which the text continues, which is taken; "" if none does."""
        for sign in signs:
            length = 1
            while sign.startswith(there := (yield from self.next(length))) and len(there) == length:
                if length == len(sign):
                    return self.take(length)
                length += 1
        return ""

    def until(self, write: Write, *signs: str) -> Reading[bool]:
        """Write what is before the first of the signs; False: the end is."""
        longest = max((len(sign) for sign in signs), default=0)
        while True:
            places = [index for sign in signs if (index := self._text.find(sign, self._at, self._end)) >= 0]
            end = min(places, default=self._end)
            if not places and not self.is_last:
                tail = self._text[max(self._at, end - longest) : end]
                end -= max((held_length(tail, sign) for sign in signs), default=0)
            if end > self._at:
                write(self.take(end - self._at))
            if places or self.is_last:
                return bool(places)
            yield


def held_length(text: str, sign: str) -> int:
    """The length of the longest end of ``text`` with which the ``sign`` begins, if not all of it is there."""
    start = text.find(sign[0], max(0, len(text) - len(sign) + 1))
    while start >= 0 and not sign.startswith(text[start:]):
        start = text.find(sign[0], start + 1)
    return len(text) - start if start >= 0 else 0
