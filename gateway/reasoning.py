"""The reasoning at the beginning of an answer, between <think> and </think>, cut off from what follows.

The text comes in pieces; how it is cut changes nothing. Does not know calls, chunks and choices.
"""

from __future__ import annotations

import math

from gateway.pieces import MAX_SPACES, held_length

_BEGIN, _END = "<think>", "</think>"


class ReasoningSplit:
    """``splits``: False: all of the text follows."""

    def __init__(self, splits: bool) -> None:
        self._held = ""
        self._num_characters = 0
        self.splits = splits
        self.end: float = 0
        """Characters of the answer that are reasoning, with its tags, as far as is known."""
        self._is_within = False  # from the prompt on
        self._is_over = not splits
        self._skips = False  # line ends behind the closing tag

    def begin_within(self) -> None:
        """The prompt ends with the opening tag."""
        self._is_within = True

    def feed(self, text: str) -> tuple[str, str]:
        """Reasoning, and what follows it, that are complete now."""
        self._num_characters += len(text)
        self._held += text
        thought = ""
        if not self._is_over and not self.end:
            self._begin()
        if self.end and not self._is_over:
            thought, closed, rest = self._held.partition(_END)
            if closed:
                self._held, self._is_over, self._skips = rest, True, True
                self.end = self._num_characters - len(rest)
            else:
                held = held_length(thought, _END)
                thought, self._held = thought[: len(thought) - held], thought[len(thought) - held :]
        if self._skips:
            self._held = self._held.lstrip("\n")
            self._skips = not self._held
        if not self._is_over:
            return thought, ""
        rest, self._held = self._held, ""
        return thought, rest

    def finish(self) -> tuple[str, str]:
        """What is left, once all text is there."""
        held, self._held = self._held, ""
        return (held, "") if (self.end or self._is_within) and not self._is_over else ("", held)

    def _begin(self) -> None:
        begin = self._held.lstrip()
        may_begin = len(self._held) - len(begin) <= MAX_SPACES
        if may_begin and begin.startswith(_BEGIN):
            self._held, self.end = begin.removeprefix(_BEGIN), math.inf
        elif not (may_begin and _BEGIN.startswith(begin)):
            self.end, self._is_over = math.inf if self._is_within else 0, not self._is_within
