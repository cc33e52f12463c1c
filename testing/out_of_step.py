"""Rounds and advances that a model service must refuse as out of step. Knows what each refusal names."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from specdec.core.errors import SpecdecError
from testing.raw import Raw, advance, draft_open, round_, target_open, tree

_UNKNOWN = 1 << 40
_MAX = 2**32 - 1
Cases = dict[str, tuple[Sequence[Any], str]]
"""By name the entries, and a regular expression of what the refusal names."""


def bad_rounds(s: int) -> Cases:
    """Of sequence ``s``, which has three tokens and its first verdict."""
    return {
        "a round of the future": ([round_(s, 2, 4)], "round 1"),
        "the round of the open": ([round_(s, 0, 4)], "round 1"),
        "the highest round": ([round_(s, _MAX, 4)], "round 1"),
        "a base of the future": ([round_(s, 1, 5)], "base 4"),
        "the highest base": ([round_(s, 1, _MAX)], "base 4"),
        "a base in the prompt": ([round_(s, 1, 2)], "base 4"),
        "no base": ([round_(s, 1, 0)], "base 4"),
        "a duplicate round": ([round_(s, 1, 4), round_(s, 1, 4)], "round 1"),
        "rounds in another order": ([round_(s, 2, 5), round_(s, 1, 4)], "round 1"),
        "three rounds at once": ([round_(s, 1, 4), *(round_(s, n, 4, tree([1, 2])) for n in (2, 3))], "round [12]"),
        "an unknown sequence": ([round_(_UNKNOWN, 1, 4)], "never opened"),
    }


def bad_advances(s: int) -> Cases:
    """Of sequence ``s``, which has three tokens and its first growth."""
    return {
        "an advance of the future": ([advance(s, 2, 3)], "advance 1"),
        "the advance of the open": ([advance(s, 0, 3)], "advance 1"),
        "a base of the future": ([advance(s, 1, 4)], "base 3"),
        "a base of the past": ([advance(s, 1, 3, [1])], "base 4"),
        "the highest base": ([advance(s, 1, _MAX, [1, 2])], "base 5"),
        "a duplicate advance": ([advance(s, 1, 4, [1]), advance(s, 1, 4, [1])], "advance 2"),
        "an unknown sequence": ([advance(_UNKNOWN, 1, 4, [1])], "never opened"),
    }


async def refusals(stream: Raw, first: int) -> AsyncIterator[tuple[str, SpecdecError, str]]:
    """Send each case to a sequence of its own, numbered from ``first`` on. Its name, the error that came back, and what
    the error must name."""
    is_target = stream.is_target
    bad = bad_rounds if is_target else bad_advances
    for number, name in enumerate(bad(0), first):
        entries, names = bad(number)[name]
        await stream.send(opens=[target_open(number) if is_target else draft_open(number)])
        await stream.answer(number)
        await stream.send(**{"rounds" if is_target else "advances": entries})
        yield name, await stream.error(entries[0].sequence), names
