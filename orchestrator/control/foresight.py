"""How often rounds find no tree of a draft that grows ahead. Knows counts; refuses to know what such a round does then,
and what it takes."""

from __future__ import annotations

from specdec.speculation.acceptance import AcceptanceRate

_HOPE, _HOPE_ROUNDS = 0.5, 4
"""This share of the rounds is taken to find none, as if so many had been seen: where the draft is far away rounds that
wait never pay, and what was not tried would never be known."""

_ROUNDS_REMEMBERED = 50


class Foresight:
    """Of rounds that wait where they find no tree, and of those that go on alone, apart."""

    def __init__(self) -> None:
        self._misses = [AcceptanceRate(_ROUNDS_REMEMBERED, _HOPE, _HOPE_ROUNDS) for _ in (False, True)]

    def observe(self, foreseen: bool, waits: bool) -> None:
        """A round found a tree, or not; then it ``waits`` or goes on alone."""
        self._misses[waits].observe(not foreseen, 1)

    def misses(self, waits: bool) -> float:
        """The share of such rounds that finds none."""
        return self._misses[waits].share()
