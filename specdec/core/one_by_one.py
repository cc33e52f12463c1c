"""One sequence's exception fails one sequence: what raises for many is computed again for each of them alone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from specdec.core.errors import PassFailed, SpecdecError

log = logging.getLogger(__name__)

_Item = TypeVar("_Item")
_Outcome = TypeVar("_Outcome")


def one_by_one(
    compute: Callable[[Sequence[_Item]], Sequence[_Outcome]], items: Sequence[_Item]
) -> list[_Outcome | SpecdecError]:
    """``compute(items)``, which has an outcome for each item. If it raises, each item is computed alone. The outcome of
    one that raises again is the error: PassFailed for an unexpected one. The outcome of an item must not depend on the
    others, nor on a call that raised."""
    try:
        return [*compute(items)]
    except Exception as error:
        if not isinstance(error, SpecdecError):
            log.exception("what was computed for %d sequences failed", len(items))
        if len(items) == 1:
            return [_named(error)]
    outcomes: list[_Outcome | SpecdecError] = []
    for item in items:
        try:
            outcomes += compute([item])
        except Exception as error:
            log.warning("one of these sequences fails alone: %r", error)
            outcomes.append(_named(error))
    return outcomes


def _named(error: Exception) -> SpecdecError:
    if isinstance(error, SpecdecError):
        return error
    failed = PassFailed("the model failed on this sequence")
    failed.__cause__ = error
    return failed
