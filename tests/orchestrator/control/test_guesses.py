"""After a guess the target is asked for each token for a while, unless that misses passes of the others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.control.costs import Costs
from orchestrator.control.guesses import Guesses
from orchestrator.control.prompt_lookup import MOST_GUESSED
from orchestrator.rounds import Rival
from specdec.core.rounds import Timings
from specdec.core.tree import TokenTree


class Lookup:
    """One good guess; then there is none."""

    def __init__(self) -> None:
        self.chances = [0.99] * MOST_GUESSED

    def look(self, ids: Any) -> list[float]:
        found, self.chances = self.chances, []
        return found

    def guess(self, num_tokens: int) -> TokenTree:
        return TokenTree.chain(range(num_tokens))


@pytest.mark.parametrize(("num_passes", "asked"), [(1, True), (2, False)])
def test_after_a_guess_tokens_come_unasked_where_to_ask_for_each_would_miss_passes(
    num_passes: int, asked: bool
) -> None:
    costs = Costs(8)
    for number in range(80):
        rows = 4 if number % 8 else 8
        costs.verified(4 * (rows == 8), 0.03, Timings(0, 30_000 + number, 0, rows, 4), num_passes, 4)
    guesses = Guesses(costs, Lookup())  # type: ignore[arg-type]
    sequence: Any = SimpleNamespace(remaining=100, num_committed=9, ids=[1, 2, 3])

    def granted() -> tuple[int, int]:
        guess, most_unasked = guesses.grant(sequence, False, 0, 0, lambda promise: Rival.TREE)
        return len(guess.tree), most_unasked

    assert granted()[0] > 0
    num_guessed, most_unasked = granted()
    assert num_guessed == 0
    assert (most_unasked == 0) is asked
