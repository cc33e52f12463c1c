"""What raises for many is computed for each of them, and what raises for one is its error."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from specdec.core.errors import InvalidArgument, PassFailed
from specdec.core.one_by_one import one_by_one


class Doubling:
    """Doubles numbers; raises for some of them."""

    def __init__(self, **raises: Exception) -> None:
        self.raises, self.calls = {int(name[1:]): error for name, error in raises.items()}, list[list[int]]()

    def __call__(self, numbers: Sequence[int]) -> list[int]:
        self.calls.append(list(numbers))
        for number in numbers:
            if number in self.raises:
                raise self.raises[number]
        return [2 * number for number in numbers]


def test_without_an_exception_there_is_one_call() -> None:
    assert one_by_one(double := Doubling(), [1, 2, 3]) == [2, 4, 6]
    assert double.calls == [[1, 2, 3]]
    assert one_by_one(Doubling(), []) == []


def test_what_raises_for_one_is_its_outcome_and_the_others_have_theirs(caplog: pytest.LogCaptureFixture) -> None:
    refused, broken = InvalidArgument([("x", "bad")]), ZeroDivisionError("planted")
    double = Doubling(_2=refused, _4=broken)
    first, second, third, fourth = one_by_one(double, [1, 2, 3, 4])
    assert (first, second, third) == (2, refused, 6)
    assert type(fourth) is PassFailed
    assert fourth.__cause__ is broken
    assert double.calls == [[1, 2, 3, 4], [1], [2], [3], [4]]
    assert "planted" in caplog.text


def test_one_alone_is_not_asked_twice(caplog: pytest.LogCaptureFixture) -> None:
    double = Doubling(_2=ZeroDivisionError("planted"))
    [outcome] = one_by_one(double, [2])
    assert type(outcome) is PassFailed
    assert double.calls == [[2]]
    assert "ZeroDivisionError: planted" in caplog.text


def test_an_error_of_the_caller_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    assert one_by_one(Doubling(_2=(refused := InvalidArgument([("x", "bad")]))), [2]) == [refused]
    assert not caplog.records
