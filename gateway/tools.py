"""Reasoning, text and calls of tools in an answer. A parser gets the text in pieces; how it is cut changes nothing.

Knows what follows what; does not know how calls are written (gateway.call_finder), chunks and choices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gateway.call_finder import CallFinder, Format, Piece
from gateway.reasoning import ReasoningSplit


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
