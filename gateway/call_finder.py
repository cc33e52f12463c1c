"""Calls of tools in a text that comes in pieces: found as model families write them, and passed on piece by piece.

Knows where calls are; does not know their forms (gateway.tool_call), reasoning and choices. What breaks a call is
passed on as it is, as the end of its arguments, up to where the next call begins.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from gateway.lenient import BrokenValue, read_value
from gateway.pieces import Reading, Source
from gateway.tool_call import CLOSE, FUNCTION, OPEN, Arguments, Call, CallReader

Format = Literal["hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic"]

_MISTRAL, _LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
_SIGNS: tuple[tuple[str, Format], ...] = (
    (FUNCTION, "qwen3_coder"),
    (OPEN, "hermes"),
    (_MISTRAL, "mistral"),
    (_LLAMA, "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
)
SPECIAL = ("llama3_json", "mistral")
"""Formats with special tokens, which must be part of the text."""

_BETWEEN = re.compile(r"[; \n]+")
_LINE_ENDS = re.compile(r"\n+")


@dataclass(frozen=True, slots=True)
class Text:
    text: str


Piece = Text | Call | Arguments


def format_of(template: str) -> Format:
    """What a chat template asks its model to write."""
    return next((kind for sign, kind in _SIGNS if sign in template), "hermes")


class CallFinder:
    """Text -> pieces, in time that grows as the text does. With ``named`` all of the text is the arguments of that
    function, with ``listed`` a JSON list of calls, both by grammar; else calls are found as ``kind`` writes them.
    ``tools``: the schemas of their arguments, by name."""

    def __init__(
        self, kind: Format | None, named: str = "", listed: bool = False, tools: Mapping[str, Any] | None = None
    ) -> None:
        self._tools = tools or {}
        self._source = Source()
        self._pieces: list[Piece] = []
        self._call = CallReader(self._source, self._pieces.append, self._tools)
        readers: dict[Format | None, Callable[[], Reading[None]]] = {
            None: self._plain,
            "hermes": partial(self._tagged, OPEN),
            "qwen3_coder": partial(self._tagged, OPEN, FUNCTION),
            "llama3_json": self._llama,
            "mistral": self._mistral,
            "pythonic": self._pythonic,
        }
        self._reading = self._named(named) if named else self._listed() if listed else readers[kind]()
        next(self._reading, None)

    def feed(self, text: str) -> list[Piece]:
        """The pieces that are complete now."""
        self._source.add(text)
        return self._read()

    def end(self) -> list[Piece]:
        """Those that are left, once all text is there."""
        self._source.finish()
        return self._read()

    def _read(self) -> list[Piece]:
        next(self._reading, None)
        pieces = _joined(self._pieces)
        self._pieces.clear()
        return pieces

    # --- pieces ------------------------------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        self._pieces.append(Text(text))

    def _tried(self, form: Reading[None]) -> Reading[bool]:
        """Whether a call is read to its end. One that has not begun is text."""
        is_read = yield from self._call.read(form)
        if not is_read and not self._call.has_begun:
            self._text(self._source.kept())
        return is_read

    def _rest(self, *signs: str) -> Reading[bool]:
        """What is behind a call that is broken, up to one of the signs; False: to the end."""
        return (yield from self._source.until(self._call.argue if self._call.has_begun else self._text, *signs))

    # --- formats -----------------------------------------------------------------------------------------------

    def _plain(self) -> Reading[None]:
        yield from self._source.until(self._text)

    def _named(self, name: str) -> Reading[None]:
        yield from self._source.skip()
        if (yield from self._source.has(1)):
            self._call.begin(name)
            try:
                yield from read_value(self._source, self._call.argue)
                yield from self._source.skip()
            except BrokenValue:
                pass  # cut off, most likely
            yield from self._source.until(self._call.argue)

    def _listed(self) -> Reading[None]:
        yield from self._source.skip()
        if (yield from self._source.starts("[")):
            yield from self._list()
        yield from self._source.until(self._text)

    def _tagged(self, *signs: str) -> Reading[None]:
        """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times, between texts; or with
        <function=...> within."""
        while (yield from self._source.until(self._text, *signs)):
            self._source.bound((OPEN, CLOSE))
            is_read = yield from self._tried(self._tag())
            self._source.bound(None)
            if not is_read and self._call.has_begun:
                yield from self._rest(OPEN, CLOSE)
            if is_read or self._call.has_begun:
                yield from self._source.skip()
                if (yield from self._source.starts(CLOSE)):
                    yield from self._source.skip(_LINE_ENDS)

    def _tag(self) -> Reading[None]:
        yield from self._source.starts(OPEN)
        yield from self._source.skip()
        if (yield from self._source.starts(FUNCTION)):
            yield from self._call.read_function()
        else:
            yield from self._call.read_object()

    def _llama(self) -> Reading[None]:
        """{"name": ..., "parameters": {...}}, at the beginning or behind the tag, with semicolons between them."""
        source = self._source
        source.keep()
        yield from source.skip()
        is_call = (yield from source.next()) == "{"
        if not is_call:
            self._text(source.kept())
        while is_call or (yield from source.until(self._text, _LLAMA)):
            if (yield from self._tried(self._call.read_object(_LLAMA))):
                yield from source.skip(_BETWEEN)
                is_call = (yield from source.next()) == "{"
            else:
                signs = self._signs('{{"name": "{}"') if self._call.num_calls else []
                is_call = (yield from self._rest(_LLAMA, *signs)) and (yield from source.next()) == "{"

    def _mistral(self) -> Reading[None]:
        """A list of calls, or name[ARGS]{...}, behind a sign that may be repeated."""
        source = self._source
        while (yield from source.until(self._text, _MISTRAL)):
            source.keep()
            yield from source.starts(_MISTRAL)
            yield from source.skip()
            if (yield from source.starts("[")):
                yield from self._list(_MISTRAL)
            elif (yield from self._tried(self._call.read_with_name())):
                yield from source.skip()
            else:
                yield from self._rest(_MISTRAL)

    def _list(self, *signs: str) -> Reading[None]:
        """What follows its bracket, up to the other one; ``signs``: of what ends it where it is broken."""
        source = self._source
        yield from source.skip()
        is_call = True
        while is_call and not (yield from source.starts("]")):
            if not (yield from self._tried(self._call.read_object())):
                yield from self._rest(*signs, *self._signs('{{"name": "{}"'))
            yield from source.skip()
            yield from source.starts(",")
            yield from source.skip()
            is_call = (yield from source.next()) in ("{", "]")
        self._text(source.kept())  # of a list without a call

    def _pythonic(self) -> Reading[None]:
        """[f(a=1, b="x"), g()], at the beginning."""
        source = self._source
        source.keep()
        yield from source.skip()
        is_call = bool((yield from source.starts("[")))
        while is_call:
            if (yield from self._tried(self._call.read_python_call())):
                yield from source.skip()
                is_call = bool((yield from source.starts(",")))
                yield from source.skip()
                is_call = not (yield from source.starts("]")) and is_call
            else:
                is_call = self._call.num_calls > 0 and (yield from self._rest(*self._signs("{}(")))
        self._text(source.kept())
        yield from source.until(self._text)

    def _signs(self, form: str) -> list[str]:
        """Where the next call begins, behind one that is broken."""
        return [form.format(name) for name in self._tools]


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Neighbours of a kind as one; none is empty."""
    joined: list[Piece] = []
    for piece in pieces:
        last = joined[-1] if joined else None
        if isinstance(piece, Call):
            joined.append(piece)
        elif type(last) is type(piece):
            joined[-1] = type(piece)(last.text + piece.text)
        elif piece.text:
            joined.append(piece)
    return joined
