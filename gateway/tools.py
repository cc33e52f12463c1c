"""Reasoning, text and calls of tools in an answer. A parser gets the text in pieces; how it is cut changes nothing.

Knows what follows what; does not know how calls are written (gateway.call_finder), chunks and choices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from gateway.bodies import ChatBody
from gateway.call_finder import SPECIAL, CallFinder, Format, Piece, format_of
from gateway.reasoning import ReasoningSplit
from gateway.structure import NamedChoice


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


Part = Piece | Reasoning


class Parser:
    """Text -> parts. The other parameters are those of gateway.call_finder.CallFinder."""

    def __init__(
        self,
        kind: Format | None = None,
        named: str = "",
        listed: bool = False,
        reasoning: bool = False,
        tools: Mapping[str, Any] | None = None,
    ) -> None:
        self.reasoning = ReasoningSplit(reasoning)
        self._calls = CallFinder(kind, named, listed, tools)
        self.is_named = bool(named)

    def feed(self, text: str) -> list[Part]:
        """The parts that are complete now."""
        return self._parts(*self.reasoning.feed(text))

    def end(self) -> list[Part]:
        """The parts that are left, once all text is there."""
        return [*self._parts(*self.reasoning.finish()), *self._calls.end()]

    def _parts(self, thought: str, text: str) -> list[Part]:
        thoughts: list[Part] = [Reasoning(thought)] if thought else []
        return [*thoughts, *(self._calls.feed(text) if text else ())]


class Formats:
    """How a model writes: its calls (``auto``: as its template says), and whether its reasoning comes first."""

    def __init__(self, calls: Literal["auto"] | Format, reasons: bool) -> None:
        self._calls = calls
        self._reasons = reasons

    def asked(self, body: ChatBody, fields: dict[str, Any]) -> dict[str, Any]:
        """The fields of a request, with what reading its answer needs."""
        if _reads_calls(body) and self._calls in ("auto", *SPECIAL):
            fields.setdefault("skip_special_tokens", False)  # some formats are made of them
        return fields | {"reasoning": self._reasons}

    def parser(self, body: ChatBody, template: str) -> Callable[[], Parser]:
        """Of one answer's text."""
        kind: Format | None = None
        if _reads_calls(body):
            kind = format_of(template) if self._calls == "auto" else self._calls
        named = body.tool_choice.function.name if isinstance(body.tool_choice, NamedChoice) else ""
        is_listed = bool(body.tools) and body.tool_choice == "required"
        tools = {tool.function.name: tool.function.parameters for tool in body.tools or ()}
        return partial(Parser, kind, named=named, listed=is_listed, reasoning=self._reasons, tools=tools)


def _reads_calls(body: ChatBody) -> bool:
    """Whether calls are found in the text of the answer."""
    return bool(body.tools) and body.tool_choice in (None, "auto")
