"""Requests that choose together, where rounds are known."""

from __future__ import annotations

from orchestrator.control.concert import Concert, Turn
from orchestrator.control.costs import Costs
from specdec.core.rounds import Timings


def concert_of(sequences: int = 4, ahead: bool = False) -> Concert:
    """Where rounds are known: a pass of 20 ms, 2 ms for a draft token."""
    costs = Costs(8, ahead)
    for number in range(40):
        depth = number % 3
        if depth:
            costs.drafted(depth, 0.002 * depth)
        rows = sequences * (depth + 1)
        costs.verified(depth, 0.0205, Timings(0, 20_000 + number, 0, rows, sequences), 1, sequences)
    assert costs.known
    return Concert(costs)


def turns(concert: Concert, promise: float, young: bool = False, last: list[Turn] | None = None) -> list[Turn]:
    """Of all requests for one pass, which is then over; ``last`` are those of the pass before."""
    promised = [1.0, *[promise] * 8]
    last = last or [Turn.REST] * concert.costs.everybody
    rounds = 2 if young else 99
    found = [concert.turn(promise, promised, 4, rounds, before is Turn.TRY) for before in last]
    before = concert.now
    assert [concert.passed(before) for _ in found] == [before + 1] * len(found)
    return found
