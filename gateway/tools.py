"""Tool calls and reasoning in the text of an answer. A parser gets the text in pieces; how it is cut changes nothing.

A call is a part once it is complete. What only looks like a call is text. Knows how texts are cut; does not know how a
call is written (gateway.calls), chunks and choices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from gateway.calls import Call, Format, JsonObject, calls_all, calls_of, listed, tagged


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


Part = Call | Text | Reasoning


class Parser:
    """Text -> parts, in time that grows as the text does. With ``named`` all of the text is the arguments of that
    function, with ``listed`` a JSON list of calls, both by grammar; else calls are found as ``kind`` writes them."""

    def __init__(
        self, kind: Format | None = None, named: str = "", listed: bool = False, reasoning: bool = False
    ) -> None:
        self._kind, self._named, self._listed = kind, named, listed
        self._kept: list[str] = []  # what may be a call
        self._rest = ""  # what follows
        self._is_whole = False  # all that follows is kept until the end
        self._tag: JsonObject | None = None  # in an open tag
        self._called: Call | None = None  # in a tag that is about to be closed
        self._reasons: bool | None = None if reasoning else False  # None: the beginning is not seen yet
        self._skips = False  # line ends behind a closed tag

    @property
    def is_named(self) -> bool:
        return bool(self._named)

    def feed(self, text: str) -> list[Part]:
        """The parts that are complete now."""
        if self._is_whole:
            self._kept.append(text)
            return []
        self._rest += text
        self._skip()
        return _joined([*self._reasoning(), *self._calls()])

    def end(self) -> list[Part]:
        """The parts that are left, once all text is there."""
        self._keep(len(self._rest))
        rest, self._kept = "".join(self._kept), []
        return _joined(self._at_end(rest))

    def _keep(self, length: int) -> None:
        self._kept.append(self._rest[:length])
        self._rest = self._rest[length:]

    def _skip(self) -> None:
        if self._skips:
            self._rest = self._rest.lstrip("\n")
            self._skips = not self._rest

    def _reasoning(self) -> Iterator[Part]:
        if self._reasons is None:
            begin = self._rest.lstrip()
            if begin.startswith("<think>"):
                self._rest, self._reasons = begin.removeprefix("<think>"), True
            elif not "<think>".startswith(begin):
                self._reasons = False
        if self._reasons:
            thought, closed, rest = self._rest.partition("</think>")
            if closed:
                self._rest, self._reasons, self._skips = rest, False, True
                self._skip()
            else:
                held = _held(thought, "</think>")
                thought, self._rest = thought[: len(thought) - held], thought[len(thought) - held :]
            if thought:
                yield Reasoning(thought)

    def _calls(self) -> Iterator[Part]:
        if self._reasons is not False or self._skips:
            return
        if self._named or self._listed:
            self._is_whole = True
        elif self._kind is None:
            yield from self._text(len(self._rest))
        elif self._kind == "hermes":
            yield from self._tagged()
        elif self._kind == "mistral":
            before, sign, _ = self._rest.partition("[TOOL_CALLS]")
            yield from self._text(len(before) - (0 if sign else _held(before, "[TOOL_CALLS]")))
            self._is_whole = bool(sign)
        elif (calls := calls_all(self._rest, self._kind)) is False:  # a call is the whole of an answer
            self._kind = None
            yield from self._text(len(self._rest))
        else:
            self._is_whole = bool(calls)
        if self._is_whole:
            self._keep(len(self._rest))

    def _text(self, length: int) -> Iterator[Part]:
        if length > 0:
            yield Text(self._rest[:length])
            self._rest = self._rest[length:]

    def _tagged(self) -> Iterator[Part]:
        """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times, between texts."""
        while self._rest:
            if self._tag is None:
                start = self._rest.find("<tool_call>")
                yield from self._text(start if start >= 0 else len(self._rest) - _held(self._rest, "<tool_call>"))
                if start < 0:
                    return
                self._keep(len("<tool_call>"))
                self._tag = JsonObject()
            elif self._called is None:
                end = self._tag.end(self._rest)
                self._keep(len(self._rest) if end is None else end)
                if end is None:
                    return
                self._called = tagged("".join(self._kept))
                if self._called is None:
                    yield from self._untagged()
            else:
                self._keep(len(self._rest) - len(self._rest.lstrip()))
                if self._rest.startswith("</tool_call>"):
                    yield self._called
                    self._kept, self._tag, self._called = [], None, None
                    self._rest, self._skips = self._rest.removeprefix("</tool_call>"), True
                    self._skip()
                elif "</tool_call>".startswith(self._rest):
                    return
                else:
                    yield from self._untagged()

    def _untagged(self) -> Iterator[Part]:
        """A tag that is none, and what was kept behind it."""
        yield Text("".join(self._kept))
        self._kept, self._tag, self._called = [], None, None

    def _at_end(self, rest: str) -> list[Part]:
        if self._reasons:
            return [Reasoning(rest)] if rest else []
        calls: Sequence[Call] | None = None
        if self._named:
            calls = [Call(self._named, rest)] if rest else None  # cut off where the answer is
        elif self._listed:
            calls = listed(rest)
        elif self._kind is not None:
            calls = calls_of(rest, self._kind)
        if calls:
            return list(calls)
        return [Text(rest)] if rest else []


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring texts as one."""
    joined: list[Part] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(part, Text) and isinstance(last, Text):
            joined[-1] = Text(last.text + part.text)
        else:
            joined.append(part)
    return joined


def _held(text: str, sign: str) -> int:
    """The length of the longest end of ``text`` with which the ``sign`` begins."""
    return max((n for n in range(1, len(sign)) if text.endswith(sign[:n])), default=0)
