"""JSON as models write it -> JSON, in pieces. Knows values; does not know calls.

Read are, too: line ends and other control characters in strings, backslashes that escape nothing, values of Python.
What JSON or UTF-8 cannot say is replaced: a number beyond all bounds by null, half a surrogate pair by U+FFFD.
"""

from __future__ import annotations

import json
import math
import re

from gateway.pieces import Reading, Source, Write

_MAX_DEPTH = 100
"""Parsers of clients have limits, too."""

_PLAIN = re.compile(r"""[^"'\\\x00-\x1f]+""")
_WORD = re.compile(r"""[^\s,:;=<>"'(){}\[\]]*""")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_WORDS = {"true": "true", "True": "true", "false": "false", "False": "false"}
_WORDS |= dict.fromkeys(("null", "None", "NaN", "nan", "Infinity", "-Infinity", "inf", "-inf"), "null")
_ESCAPED = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"} | {sign: sign for sign in "\"'\\/"}
_CODES = {"u": 6, "x": 4, "U": 10}
"""Lengths of escapes by code."""
_QUOTES = ('"""', "'''", '"', "'")
_CLOSING = {"{": "}", "[": "]", "(": ")"}
_HIGH, _LOW = range(0xD800, 0xDC00), range(0xDC00, 0xE000)


class BrokenValue(Exception):
    """The text is no value, or ends within one. What was read of it is written."""


def read_value(source: Source, write: Write, depth: int = 0) -> Reading[None]:
    yield from source.skip()
    begin = yield from source.next()
    if begin in ("{", "[", "("):
        yield from _read_container(source, write, depth)
    elif begin in ('"', "'"):
        yield from read_string(source, write)
    else:
        word = yield from source.word(_WORD)
        written = _WORDS.get(word)
        if written is None and _NUMBER.fullmatch(word):
            written = word if math.isfinite(float(word)) else "null"
        if written is None:
            raise BrokenValue
        source.take(len(word))
        write(written)


def _read_container(source: Source, write: Write, depth: int) -> Reading[None]:
    """An object, or a list (in Python a tuple, too)."""
    if depth == _MAX_DEPTH:
        raise BrokenValue
    opening = source.take(1)
    closing = _CLOSING[opening]
    write("{" if opening == "{" else "[")
    separator = ""
    while (yield from goes_on(source, closing, bool(separator))):
        write(separator)
        separator = ", "
        if opening == "{":
            yield from read_string(source, write)
            yield from expect(source, ":")
            write(": ")
        yield from read_value(source, write, depth + 1)
    write("}" if opening == "{" else "]")


def goes_on(source: Source, closing: str, needs_comma: bool) -> Reading[bool]:
    """Whether an item follows, before what closes them; the comma or the closing sign is taken."""
    yield from source.skip()
    has_comma = needs_comma and bool((yield from source.starts(",")))
    yield from source.skip()
    if (yield from source.starts(closing)):
        return False
    if needs_comma and not has_comma:
        raise BrokenValue
    return True


def expect(source: Source, sign: str) -> Reading[None]:
    yield from source.skip()
    if not (yield from source.starts(sign)):
        raise BrokenValue


def read_string(source: Source, write: Write) -> Reading[None]:
    quote = yield from source.starts(*_QUOTES)
    if not quote:
        raise BrokenValue
    write('"')
    while not (yield from source.starts(quote)):
        if plain := source.take_run(_PLAIN):
            write(plain)
        elif not (sign := (yield from source.next())):
            raise BrokenValue
        elif sign == "\\":
            write_text(write, (yield from _read_escape(source)))
        else:
            write_text(write, source.take(1))
    write('"')


def write_text(write: Write, text: str) -> None:
    """A part of a string."""
    write(json.dumps(text, ensure_ascii=False)[1:-1])


def _read_escape(source: Source) -> Reading[str]:
    """What it stands for."""
    kind = (yield from source.next(2))[1:]
    length = _CODES.get(kind, 2)
    code = (yield from _code(source, length)) if kind in _CODES else None
    if not kind or code == -1:
        raise BrokenValue
    if code is None or code >= 0x110000:
        source.take(1)
        return _ESCAPED[source.take(1)] if kind in _ESCAPED else "\\"
    source.take(length)
    if code in _HIGH and (yield from source.next(2)) == "\\u":
        low = yield from _code(source, 6)
        if low is not None and low in _LOW:
            source.take(6)
            return chr(0x10000 + ((code - _HIGH.start) << 10) + (low - _LOW.start))
    return "\ufffd" if code in _HIGH or code in _LOW else chr(code)


def _code(source: Source, length: int) -> Reading[int | None]:
    """Of an escape of so many characters; None: it is none, -1: the end cuts it off."""
    written = yield from source.next(length)
    if not re.fullmatch(r"\\[uxU][0-9a-fA-F]*", written):
        return None
    return int(written[2:], 16) if len(written) == length else -1


def json_of(text: str) -> str | None:
    """The JSON of a text that is one value; None: it is none."""
    source, written = Source(), list[str]()
    source.add(text + "\n")
    source.finish()
    try:
        for reading in (read_value(source, written.append), source.skip()):
            for _ in reading:
                pass
    except BrokenValue:
        return None
    return None if source.take(1) else "".join(written)
