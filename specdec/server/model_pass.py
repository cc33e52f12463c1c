"""A pass of a model for many sequences, of which one may raise. Does not know what is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from specdec.core.errors import PassFailed, SpecdecError
from specdec.core.one_by_one import one_by_one

_Sequence = TypeVar("_Sequence")
_Outcome = TypeVar("_Outcome")


def run_pass(
    compute: Callable[[Sequence[_Sequence]], Sequence[_Outcome]],
    sequences: Sequence[_Sequence],
    lose: Callable[[_Sequence], None],
) -> list[_Outcome | SpecdecError]:
    """The outcome of each of ``sequences``, of which there is one at least: see one_by_one. A pass that raises leaves
    anything in their states: ``lose`` discards a state, and ``compute`` makes a new one where there is none. Raises
    PassFailed if every pass raises."""
    num_computed = 0

    def attempt(part: Sequence[_Sequence]) -> Sequence[_Outcome]:
        nonlocal num_computed
        try:
            outcomes = compute(part)
        except Exception:
            for sequence in part:
                lose(sequence)
            raise
        num_computed += 1
        return outcomes

    outcomes = one_by_one(attempt, sequences)
    failed = [outcome for outcome in outcomes if isinstance(outcome, PassFailed)]
    if not num_computed and len(failed) == len(outcomes):
        raise PassFailed("the model computes nothing") from failed[0]
    return outcomes
