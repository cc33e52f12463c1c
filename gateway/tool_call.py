"""A call of a tool as models write it: read piece by piece, and passed on as JSON.

Knows the forms of a call; does not know where calls are in a text. A call begins once its name and the beginning of its
arguments are there: what only looks like one is text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from gateway.lenient import BrokenValue, expect, goes_on, json_of, read_string, read_value, write_text
from gateway.pieces import Reading, Source, Write

OPEN, CLOSE, FUNCTION = "<tool_call>", "</tool_call>", "<function="
_NAME = re.compile(r"[\w.-]*")
_TAG_NAME = re.compile(r"[^\s<>]*")


@dataclass(frozen=True, slots=True)
class Call:
    """The beginning of a call."""

    name: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


@dataclass(frozen=True, slots=True)
class Arguments:
    """A piece of the last call's arguments: of a JSON object, unless the model broke it or was cut off."""

    text: str


class CallReader:
    """Reads calls, one after another. ``write`` takes what is read; ``tools``: the schemas of arguments, by name."""

    def __init__(self, source: Source, write: Callable[[Call | Arguments], object], tools: Mapping[str, Any]) -> None:
        self._source, self._write, self._tools = source, write, tools
        self.has_begun = self.is_complete = False
        """The call that is read; complete are its arguments."""
        self.num_calls = 0

    def begin(self, name: str) -> None:
        self._write(Call(name))
        self.has_begun = True
        self.num_calls += 1
        self._source.kept()

    def argue(self, text: str) -> None:
        self._write(Arguments(text))

    def read(self, form: Reading[None]) -> Reading[bool]:
        """Whether a call is there to its end, but for what follows its arguments. If it is broken, the rest is not
        taken; if it has not begun, what was taken is kept by the source."""
        self.has_begun = self.is_complete = False
        self._source.keep()
        try:
            yield from form
        except BrokenValue:
            return self.is_complete
        return True

    def read_object(self, tag: str = "") -> Reading[None]:
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
            if key not in ("name", "arguments", "parameters") or self.has_begun:
                yield from read_value(source, lambda _: None)
            elif key == "name":
                name = yield from self._string()
            elif name and (yield from source.next()) == "{":
                self.begin(name)
                yield from read_value(source, self.argue)
                self.is_complete = True
            else:
                arguments = yield from self._collected()
        if not name:
            raise BrokenValue
        if not self.has_begun:
            self.begin(name)
            self.argue(arguments)
        self.is_complete = True

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

    def read_with_name(self) -> Reading[None]:
        name = yield from self._word()
        yield from self._source.skip()
        if (yield from self._source.starts("[CALL_ID]")):
            yield from self._word()
        yield from self._source.starts("[ARGS]")
        yield from self._source.skip()
        if (yield from self._source.next()) != "{":
            raise BrokenValue
        self.begin(name)
        yield from read_value(self._source, self.argue)

    def read_python_call(self) -> Reading[None]:
        name = yield from self._word()
        yield from expect(self._source, "(")
        before = "{"
        while (yield from goes_on(self._source, ")", before == ", ")):
            key = yield from self._word()
            yield from expect(self._source, "=")
            if before == "{":
                self.begin(name)
            self.argue(f"{before}{json.dumps(key)}: ")
            before = ", "
            yield from read_value(self._source, self.argue)
        if before == "{":
            self.begin(name)
        self.argue("{}" if before == "{" else "}")
        self.is_complete = True

    def read_function(self) -> Reading[None]:
        """What follows <function=: its name, and <parameter=name>value</parameter> any number of times."""
        name = yield from self._word(_TAG_NAME)
        yield from expect(self._source, ">")
        self.begin(name)
        yield from self._source.skip()
        if (yield from self._source.next()) == "{":  # as Functionary writes it
            yield from read_value(self._source, self.argue)
            self.is_complete = True
            yield from expect(self._source, "</function>")
            return
        properties = self._tools.get(name, {}).get("properties")
        before = "{"
        while True:
            yield from self._source.skip()
            if (yield from self._source.starts("</function>")):
                break
            following = yield from self._source.next(len(CLOSE))
            if following == CLOSE or (not following and self._source.is_closed):
                break
            yield from expect(self._source, "<parameter=")
            key = yield from self._word(_TAG_NAME)
            yield from expect(self._source, ">")
            self.argue(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
            before = ", "
            schema = properties.get(key) if isinstance(properties, dict) else None
            yield from self._parameter(_types(schema))
        self.argue("{}" if before == "{" else "}")
        self.is_complete = True

    def _parameter(self, types: set[str]) -> Reading[None]:
        """A text, or JSON as far as the schema allows it."""
        yield from self._source.starts("\n")
        written: list[str] = []
        is_text = types == {"string"}
        if is_text:
            self.argue('"')
        write: Write = partial(write_text, self.argue) if is_text else written.append
        if not (yield from self._source.until(write, "\n</parameter>", "</parameter>")):
            self.argue("".join(written))
            raise BrokenValue
        yield from self._source.starts("\n")
        yield from self._source.starts("</parameter>")
        text = "".join(written)
        value = json_of(text)
        if value is None or ("string" in types and value != "null"):
            value = json.dumps(text, ensure_ascii=False)
        self.argue('"' if is_text else value)


def _types(schema: Any) -> set[str]:
    """Those that a schema of an argument names. It is a caller's, and may be anything."""
    if not isinstance(schema, dict):
        return set()
    types = {name for name in _as_list(schema.get("type")) if isinstance(name, str)}
    options = [option for key in ("anyOf", "oneOf") for option in _as_list(schema.get(key))]
    return types.union(*map(_types, options))


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]
