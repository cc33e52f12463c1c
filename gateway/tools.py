"""Tool calls and reasoning in the text of an answer. A parser gets the text in pieces; how it is cut changes nothing.

A call is told when it is complete. What only looks like a call is text. Knows the formats of model families; does not
know chunks and choices.
"""

from __future__ import annotations

import ast
import json
import re
import secrets
from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True, slots=True)
class Call:
    """``arguments``: a JSON object, as text."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{secrets.token_hex(12)}", compare=False)


@dataclass(frozen=True, slots=True)
class Text:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


Part = Call | Text | Reasoning


def format_of(template: str) -> Format:
    """What a chat template asks its model to write."""
    return next((kind for sign, kind in _SIGNS if sign in template), "hermes")


class Parser:
    """Text -> parts. With ``named`` all of the text is the arguments of that function, with ``listed`` a JSON list of
    calls, both by grammar; else calls are found as ``kind`` writes them."""

    def __init__(
        self, kind: Format | None = None, named: str = "", listed: bool = False, reasoning: bool = False
    ) -> None:
        self._kind, self._named, self._listed = kind, named, listed
        self._rest = ""
        self._reasons: bool | None = None if reasoning else False  # None: the beginning is not seen yet
        self._skips = False  # line ends behind a closed tag

    @property
    def is_named(self) -> bool:
        return bool(self._named)

    def feed(self, text: str) -> list[Part]:
        """The parts that are complete now."""
        self._rest += text
        self._skip()
        return _joined([*self._reasoning(), *self._calls()])

    def end(self) -> list[Part]:
        """The parts that are left, once all text is there."""
        found = self._at_end()
        self._rest = ""
        return _joined(found)

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
                held = _held(thought, ("</think>",))
                thought, self._rest = thought[: len(thought) - held], thought[len(thought) - held :]
            if thought:
                yield Reasoning(thought)

    def _calls(self) -> Iterator[Part]:
        if self._reasons is not False or self._named or self._listed:
            return
        if self._kind is None:
            yield from self._told(len(self._rest))
        elif self._kind == "hermes":
            yield from self._tagged()
        elif self._kind == "mistral":
            before, sign, _ = self._rest.partition("[TOOL_CALLS]")
            yield from self._told(len(before) - (0 if sign else _held(before, ("[TOOL_CALLS]",))))
        elif not _may_call(self._rest, self._kind):
            self._kind = None  # a call is the whole of an answer
            yield from self._told(len(self._rest))

    def _told(self, length: int) -> Iterator[Part]:
        if length > 0:
            yield Text(self._rest[:length])
            self._rest = self._rest[length:]

    def _tagged(self) -> Iterator[Part]:
        """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of times, between texts."""
        while True:
            at = self._rest.find("<tool_call>")
            yield from self._told(at if at >= 0 else len(self._rest) - _held(self._rest, ("<tool_call>",)))
            if at < 0:
                return
            inner = self._rest.removeprefix("<tool_call>")
            end = inner.find("</tool_call>")
            while end >= 0 and (call := _call(_value(inner[:end]))) is None:
                end = inner.find("</tool_call>", end + 1)  # it may be part of an argument
            if end < 0 or call is None:
                return
            yield call
            self._rest, self._skips = inner[end + len("</tool_call>") :], True
            self._skip()

    def _at_end(self) -> list[Part]:
        rest = self._rest
        if self._reasons:
            return [Reasoning(rest)] if rest else []
        calls: Sequence[Call] | None = None
        if self._named:
            calls = [Call(self._named, rest)] if rest else None  # cut off where the answer is
        elif self._listed:
            calls = _listed(_value(rest))
        elif self._kind == "hermes":
            calls = _all([_call(_value(rest.removeprefix("<tool_call>")))]) if rest.startswith("<tool_call>") else None
        elif self._kind == "mistral":
            calls = _of_mistral(rest.removeprefix("[TOOL_CALLS]")) if rest.startswith("[TOOL_CALLS]") else None
        elif self._kind == "llama3_json":
            calls = _all([_call(value) for value in _values(rest.strip().removeprefix("<|python_tag|>"))])
        elif self._kind == "pythonic":
            calls = _of_python(rest.strip())
        if calls:
            return list(calls)
        return [Text(rest)] if rest else []


def _joined(parts: Sequence[Part]) -> list[Part]:
    """Neighbouring texts as one."""
    found: list[Part] = []
    for part in parts:
        last = found[-1] if found else None
        if isinstance(part, Text) and isinstance(last, Text):
            found[-1] = Text(last.text + part.text)
        else:
            found.append(part)
    return found


def _held(text: str, signs: Sequence[str]) -> int:
    """The length of the longest end of ``text`` with which one of the ``signs`` begins."""
    return max((n for sign in signs for n in range(1, len(sign)) if text.endswith(sign[:n])), default=0)


def _may_call(text: str, kind: Format) -> bool:
    """Whether a text that begins like this can still be a call."""
    begin = text.lstrip()
    if kind == "pythonic":
        return re.fullmatch(r"(\[\s*([A-Za-z_][\w.]*\s*(\(.*)?)?)?", begin, re.DOTALL) is not None
    return begin[:1] in ("", "{") or "<|python_tag|>".startswith(begin[:14])


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _values(text: str) -> list[Any]:
    """JSON values with semicolons between them; [None] if it is anything else."""
    found, at = [], 0
    while text := text[at:].lstrip("; \n"):
        try:
            value, at = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):
            return [None]
        found.append(value)
    return found


def _call(value: Any) -> Call | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):
        arguments = _value(arguments)
    return Call(value["name"], json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None


def _listed(value: Any) -> list[Call] | None:
    return _all([_call(each) for each in value]) if isinstance(value, list) else None


def _all(calls: Sequence[Call | None]) -> list[Call] | None:
    """None if one is missing."""
    found = [call for call in calls if call is not None]
    return found if found and len(found) == len(calls) else None


def _of_mistral(text: str) -> list[Call] | None:
    """A list of calls, or name[ARGS]{...}, which begins anew with each [TOOL_CALLS]."""
    if (calls := _listed(_value(text))) is not None:
        return calls
    named_ones = text.split("[TOOL_CALLS]")
    parts = [re.fullmatch(r"\s*([\w.-]+)\s*(?:\[ARGS\])?\s*(\{.*\})\s*", part, re.DOTALL) for part in named_ones]
    named = [None if found is None else _call({"name": found[1], "arguments": _value(found[2])}) for found in parts]
    return _all(named)


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
            arguments = {each.arg: ast.literal_eval(each.value) for each in node.keywords if each.arg}
            calls.append(_call({"name": ast.unparse(node.func), "arguments": arguments}))
        except (ValueError, TypeError, RecursionError):
            return None
    return _all(calls)
