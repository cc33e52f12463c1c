"""Calls of tools as models write them. Knows the formats of model families; does not know pieces of a text."""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Format = Literal["hermes", "llama3_json", "mistral", "pythonic"]

_SIGNS: tuple[tuple[str, Format], ...] = (
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_tag|>", "llama3_json"),
    ('"parameters": dictionary', "llama3_json"),
)
SPECIAL = ("llama3_json", "mistral")
"""Formats with special tokens, which must be part of the text."""

_BETWEEN = re.compile(r"[; \n]*")


@dataclass(frozen=True, slots=True)
class Call:
    """``arguments``: a JSON object, as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


def format_of(template: str) -> Format:
    """What a chat template asks its model to write."""
    return next((kind for sign, kind in _SIGNS if sign in template), "hermes")


class JsonObject:
    """A JSON object that comes in pieces: where it ends. Looks at each character once."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = self._escaped = False

    def end(self, text: str) -> int | None:
        """Its end in the next piece, or where it is broken; None: it goes on."""
        for index, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped, self._in_string = character == "\\", character != '"'
            elif character == "{":
                self._depth += 1
            elif character == "<" or (not self._depth and not character.isspace()):
                return index
            elif character == "}":
                self._depth -= 1
                if not self._depth:
                    return index + 1
            else:
                self._in_string = character == '"'
        return None


def calls_all(text: str, kind: Format) -> bool | None:
    """Whether an answer that begins like this consists of calls; None: it is too short to tell."""
    begin = text.lstrip()
    if kind == "pythonic":
        match = re.fullmatch(r"(?:\[\s*(?:[A-Za-z_][\w.]{0,63}\s*(\(.*)?)?)?", begin, re.DOTALL)
        return None if match and not match[1] else bool(match)
    if begin.startswith(("{", "<|python_tag|>")):
        return True
    return None if "<|python_tag|>".startswith(begin) else False


def calls_of(text: str, kind: Format) -> list[Call] | None:
    """The calls of which a text consists; None: it has something else."""
    if kind == "hermes":
        return None if (call := tagged(text)) is None else [call]
    if kind == "mistral":
        return _of_mistral(text.removeprefix("[TOOL_CALLS]")) if text.startswith("[TOOL_CALLS]") else None
    if kind == "llama3_json":
        return _all([_call(value) for value in _values(text.strip().removeprefix("<|python_tag|>"))])
    return _of_python(text.strip())


def tagged(text: str) -> Call | None:
    """The call in a tag that is not closed."""
    return _call(_value(text.removeprefix("<tool_call>"))) if text.startswith("<tool_call>") else None


def listed(text: str) -> list[Call] | None:
    """Those of a list in JSON."""
    value = _value(text)
    return _all([_call(item) for item in value]) if isinstance(value, list) else None


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _values(text: str) -> list[Any]:
    """JSON values with semicolons between them; [None] if it is anything else."""
    values, start = [], 0
    while (start := _BETWEEN.match(text, start).end()) < len(text):  # type: ignore[union-attr]
        try:
            value, start = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            return [None]
        values.append(value)
    return values


def _call(value: Any) -> Call | None:
    """None: it is none, or has a number that JSON cannot write, such as 1e999."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _value(arguments)
    if not isinstance(arguments, dict):
        return None
    try:
        return Call(_sound(value["name"]), _sound(json.dumps(arguments, ensure_ascii=False, allow_nan=False)))
    except (ValueError, TypeError, RecursionError):
        return None


def _sound(text: str) -> str:
    """The text with U+FFFD for each half of a surrogate pair: escapes of JSON can make one, and UTF-8 has none."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _all(calls: Sequence[Call | None]) -> list[Call] | None:
    """None if one is missing."""
    present = [call for call in calls if call is not None]
    return present if present and len(present) == len(calls) else None


def _of_mistral(text: str) -> list[Call] | None:
    """A list of calls, or name[ARGS]{...}, which begins again with each [TOOL_CALLS]."""
    if (calls := listed(text)) is not None:
        return calls
    # Possessive: without it n spaces that no call follows would be tried in n * n ways.
    form = r"\s*+([\w.-]++)\s*+(?:\[ARGS\]\s*+)?(\{.*\})\s*"
    matches = [re.fullmatch(form, part, re.DOTALL) for part in text.split("[TOOL_CALLS]")]
    return _all([match and _call({"name": match[1], "arguments": _value(match[2])}) for match in matches])


def _of_python(text: str) -> list[Call] | None:
    """[f(a=1, b="x"), g()]"""
    try:
        tree = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if not isinstance(tree, ast.List):
        return None
    calls: list[Call | None] = []
    for node in tree.elts:
        if not isinstance(node, ast.Call) or node.args:
            return None
        try:
            arguments = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg}
            calls.append(_call({"name": ast.unparse(node.func), "arguments": arguments}))
        except (ValueError, TypeError, RecursionError):
            return None
    return _all(calls)
