"""A pass of a model for many sequences, of which one may raise. Knows memories; does not know what is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from specdec.core.errors import PassFailed, SpecdecError
from specdec.core.one_by_one import one_by_one
from specdec.core.sequence import SequenceSpec


class Model(Protocol):
    """The part of a verifier or a drafter that has to do with memories."""

    def open(self, spec: SequenceSpec) -> Any: ...

    def close(self, memory: Any) -> None: ...


class Remembered(Protocol):
    """A sequence with a memory; None: it was lost, or the model needs none."""

    memory: Any

    @property
    def spec(self) -> SequenceSpec: ...


_Sequence = TypeVar("_Sequence", bound=Remembered)
_Found = TypeVar("_Found")


def run_pass(
    model: Model, compute: Callable[[Sequence[_Sequence]], Sequence[_Found]], sequences: Sequence[_Sequence]
) -> list[_Found | SpecdecError]:
    """The outcome of each of ``sequences``, of which there is one at least: see one_by_one. A pass that raises leaves
    anything in memories, so its sequences get new ones. Raises PassFailed if it raises for each of them."""
    num_computed = 0

    def attempt(some: Sequence[_Sequence]) -> Sequence[_Found]:
        nonlocal num_computed
        try:
            for each in some:
                if each.memory is None:
                    each.memory = model.open(each.spec)
            found = compute(some)
        except Exception:
            for each in some:
                lose(model, each)
            raise
        num_computed += 1
        return found

    outcomes = one_by_one(attempt, sequences)
    failed = [outcome for outcome in outcomes if isinstance(outcome, PassFailed)]
    if not num_computed and len(failed) == len(outcomes):
        raise PassFailed("the model computes nothing") from failed[0]
    return outcomes


def lose(model: Model, sequence: Remembered) -> None:
    """Close the memory of a sequence."""
    memory, sequence.memory = sequence.memory, None
    if memory is not None:
        model.close(memory)
