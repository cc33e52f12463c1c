"""Calls of tools as models write them: found in a text that comes in pieces, and passed on piece by piece.

Knows the formats of model families; does not know reasoning and choices. A call begins once its name and the beginning
of its arguments are there: what only looks like one is text. What breaks it then is passed on as it is, as the end of
its arguments, up to where the next call begins.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from gateway.lenient import BrokenValue, expect, goes_on, json_of, read_string, read_value, write_text
from gateway.source import Reading, Source, Write

Format = Literal["hermes", "qwen3_coder", "llama3_json", "mistral", "pythonic"]

_SIGNS: tuple[tuple[str, Format], ...] = (
    ("<function=", "qwen3_coder"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
)
SPECIAL = ("llama3_json", "mistral")
"""Formats with special tokens, which must be part of the text."""

_OPEN, _CLOSE, _FUNCTION = "<tool_call>", "</tool_call>", "<function="
_MISTRAL, _LLAMA = "[TOOL_CALLS]", "<|python_tag|>"
_BETWEEN = re.compile(r"[; \n]+")
_LINE_ENDS = re.compile(r"\n+")
_NAME = re.compile(r"[\w.-]*")
_TAG_NAME = re.compile(r"[^\s<>]*")


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Call:
    """The beginning of a call."""

    name: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the last call's arguments: of a JSON object, unless the model broke it or was cut off."""

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
        self._has_begun = self._is_complete = False  # the call that is read
        self._has_calls = False
        readers: dict[Format | None, Callable[[], Reading[None]]] = {
            None: self._plain,
            "hermes": partial(self._tagged, _OPEN),
            "qwen3_coder": partial(self._tagged, _OPEN, _FUNCTION),
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
        pieces, self._pieces = self._pieces, []
        return _joined(pieces)

    # --- pieces ------------------------------------------------------------------------------------------------

    def _text(self, text: str) -> None:
        self._pieces.append(Text(text))

    def _begin(self, name: str) -> None:
        self._pieces.append(Call(name))
        self._has_begun = self._has_calls = True
        self._source.kept()

    def _argue(self, text: str) -> None:
        self._pieces.append(Arguments(text))

    def _tried(self, reading: Reading[None]) -> Reading[bool]:
        """Whether a call is read to its end. One that has not begun is text; one that is complete may lack what follows
        its arguments."""
        self._has_begun = self._is_complete = False
        self._source.keep()
        try:
            yield from reading
        except BrokenValue:
            kept = self._source.kept()
            if not self._has_begun:
                self._text(kept)
            return self._is_complete
        return True

    def _rest(self, *signs: str) -> Reading[bool]:
        """What is behind a call that is broken, up to one of the signs; False: to the end."""
        return (yield from self._source.until(self._argue if self._has_begun else self._text, *signs))

    # --- formats -----------------------------------------------------------------------------------------------

    def _plain(self) -> Reading[None]:
        yield from self._source.until(self._text)

    def _named(self, name: str) -> Reading[None]:
        yield from self._source.skip()
        if (yield from self._source.has(1)):
            self._begin(name)
            try:
                yield from read_value(self._source, self._argue)
                yield from self._source.skip()
            except BrokenValue:
                pass  # cut off, most likely
            yield from self._source.until(self._argue)

    def _listed(self) -> Reading[None]:
        yield from self._source.skip()
        if (yield from self._source.starts("[")):
            yield from self._list()
        yield from self._source.until(self._text)

    def _tagged(self, *signs: str) -> Reading[None]:
        """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times, between texts; or with
        <function=...> within."""
        while (yield from self._source.until(self._text, *signs)):
            self._source.bound((_OPEN, _CLOSE))
            is_read = yield from self._tried(self._tag())
            self._source.bound(None)
            if not is_read and self._has_begun:
                yield from self._rest(_OPEN, _CLOSE)
            if is_read or self._has_begun:
                yield from self._source.skip()
                if (yield from self._source.starts(_CLOSE)):
                    yield from self._source.skip(_LINE_ENDS)

    def _tag(self) -> Reading[None]:
        yield from self._source.starts(_OPEN)
        yield from self._source.skip()
        if (yield from self._source.starts(_FUNCTION)):
            yield from self._function()
        else:
            yield from self._object()

    def _llama(self) -> Reading[None]:
        """{"name": ..., "parameters": {...}}, at the beginning or behind the tag, with semicolons between them."""
        source = self._source
        source.keep()
        yield from source.skip()
        is_call = (yield from source.next()) == "{"
        if not is_call:
            self._text(source.kept())
        while is_call or (yield from source.until(self._text, _LLAMA)):
            if (yield from self._tried(self._object(_LLAMA))):
                yield from source.skip(_BETWEEN)
                is_call = (yield from source.next()) == "{"
            else:
                signs = self._signs('{{"name": "{}"') if self._has_calls else []
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
            elif (yield from self._tried(self._with_name())):
                yield from source.skip()
            else:
                yield from self._rest(_MISTRAL)

    def _list(self, *signs: str) -> Reading[None]:
        """What follows its bracket, up to the other one; ``signs``: of what ends it where it is broken."""
        source = self._source
        yield from source.skip()
        is_call = True
        while is_call and not (yield from source.starts("]")):
            if not (yield from self._tried(self._object())):
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
            if (yield from self._tried(self._python_call())):
                yield from source.skip()
                is_call = bool((yield from source.starts(",")))
                yield from source.skip()
                is_call = not (yield from source.starts("]")) and is_call
            else:
                is_call = self._has_calls and (yield from self._rest(*self._signs("{}(")))
        self._text(source.kept())
        yield from source.until(self._text)

    def _signs(self, form: str) -> list[str]:
        """Where the next call begins, behind one that is broken."""
        return [form.format(name) for name in self._tools]

    # --- a call ------------------------------------------------------------------------------------------------

    def _object(self, tag: str = "") -> Reading[None]:
        """{"name": ..., "arguments": {...}}, which may be told apart by a tag."""
        source = self._source
        yield from source.starts(*([tag] if tag else []))
        yield from expect(source, "{")
        name, arguments, has_comma = "", "{}", False
        while (yield from goes_on(source, "}", has_comma)):
            has_comma = True
            key = yield from self._string()
            yield from expect(source, ":")
            yield from source.skip()
            if key not in ("name", "arguments", "parameters") or self._has_begun:
                yield from read_value(source, lambda _: None)
            elif key == "name":
                name = yield from self._string()
            elif name and (yield from source.next()) == "{":
                self._begin(name)
                yield from read_value(source, self._argue)
                self._is_complete = True
            else:
                arguments = yield from self._collected()
        if not name:
            raise BrokenValue
        if not self._has_begun:
            self._begin(name)
            self._argue(arguments)
        self._is_complete = True

    def _collected(self) -> Reading[str]:
        """Arguments that cannot be passed on yet: a call without a name so far, or JSON in a string."""
        written: list[str] = []
        yield from read_value(self._source, written.append)
        value = "".join(written)
        if value.startswith('"'):
            value = json_of(json.loads(value).strip() or "{}") or ""
        if value == "null":
            return "{}"
        if not value.startswith("{"):
            raise BrokenValue
        return value

    def _string(self) -> Reading[str]:
        written: list[str] = []
        yield from read_string(self._source, written.append)
        return str(json.loads("".join(written)))

    def _word(self, pattern: re.Pattern[str] = _NAME) -> Reading[str]:
        word = yield from self._source.word(pattern)
        if not word:
            raise BrokenValue
        return self._source.take(len(word))

    def _with_name(self) -> Reading[None]:
        name = yield from self._word()
        yield from self._source.skip()
        if (yield from self._source.starts("[CALL_ID]")):
            yield from self._word()
        yield from self._source.starts("[ARGS]")
        yield from self._source.skip()
        if (yield from self._source.next()) != "{":
            raise BrokenValue
        self._begin(name)
        yield from read_value(self._source, self._argue)

    def _python_call(self) -> Reading[None]:
        name = yield from self._word()
        yield from expect(self._source, "(")
        before = "{"
        while (yield from goes_on(self._source, ")", before == ", ")):
            key = yield from self._word()
            yield from expect(self._source, "=")
            if before == "{":
                self._begin(name)
            self._argue(f"{before}{json.dumps(key)}: ")
            before = ", "
            yield from read_value(self._source, self._argue)
        if before == "{":
            self._begin(name)
        self._argue("{}" if before == "{" else "}")
        self._is_complete = True

    def _function(self) -> Reading[None]:
        """What follows <function=: its name, and <parameter=name>value</parameter> any number of times."""
        name = yield from self._word(_TAG_NAME)
        yield from expect(self._source, ">")
        self._begin(name)
        properties = self._tools.get(name, {}).get("properties", {})
        before = "{"
        while True:
            yield from self._source.skip()
            if (yield from self._source.starts("</function>")):
                break
            following = yield from self._source.next(len(_CLOSE))
            if following == _CLOSE or (not following and self._source.is_closed):
                break
            yield from expect(self._source, "<parameter=")
            key = yield from self._word(_TAG_NAME)
            yield from expect(self._source, ">")
            self._argue(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            yield from self._parameter(_types(properties.get(key)))
        self._argue("{}" if before == "{" else "}")
        self._is_complete = True

    def _parameter(self, types: set[str]) -> Reading[None]:
        """A text, or JSON as far as the schema allows it."""
        yield from self._source.starts("\n")
        written: list[str] = []
        is_text = types == {"string"}
        if is_text:
            self._argue('"')
        write: Write = partial(write_text, self._argue) if is_text else written.append
        if not (yield from self._source.until(write, "\n</parameter>", "</parameter>")):
            self._argue("".join(written))
            raise BrokenValue
        yield from self._source.starts("\n")
        yield from self._source.starts("</parameter>")
        text = "".join(written)
        value = json_of(text)
        if value is None or ("string" in types and value != "null"):
            value = json.dumps(text, ensure_ascii=False)
        self._argue('"' if is_text else value)


def _types(schema: Any) -> set[str]:
    """Those that a schema of an argument names."""
    if not isinstance(schema, dict):
        return set()
    types = schema.get("type", [])
    inner = [_types(option) for key in ("anyOf", "oneOf") for option in schema.get(key) or ()]
    return {types} if isinstance(types, str) else {*types}.union(*inner)


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
