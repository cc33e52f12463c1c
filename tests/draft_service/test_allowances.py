"""A draft sends no more than its advances allow, whatever becomes of them; else orchestrators would eject it."""

from __future__ import annotations

import random

import pytest

from draft_service.engine import DraftEngine, DraftOpen
from orchestrator.replicas.allowances import of_budget, size_of_growth
from specdec.core.rounds import Advance, Budget
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.server.step_loop import Key
from specdec.transport.wire import write_growth
from testing.table_model import Table, TableDrafter

KEY = Key(1, 1)


class Caller:
    """Follows the table for a while, or leaves it; asks for anything. ``left``: entries that the draft may send."""

    def __init__(self, chance: random.Random, budget: Budget) -> None:
        self.ids = [1, 2, 3]
        self.tree = EMPTY_TREE
        self.number = self.reach = self.left = 0
        self._chance = chance
        self._allow(budget, EMPTY_TREE)

    def _allow(self, budget: Budget, flying: TokenTree) -> None:
        levels = max(budget.max_depth, 1 + max(flying.depths, default=-1))
        self.reach = max(self.reach, len(self.ids) + levels)
        self.left += of_budget(budget, self.reach - len(self.ids), with_probs=False)

    def advance(self) -> Advance:
        chance = self._chance
        new = list(self.tree.prefix(chance.randrange(4)).trunk().token_ids) or [chance.randrange(9)]
        self.ids += new
        self.number += 1
        budget = any_budget(chance)
        tree = self.tree.descend(new)
        flying = tree.prefix(chance.randrange(9)) if budget.max_ahead else EMPTY_TREE
        self.tree = flying.merge(tree)
        self._allow(budget, flying)
        return Advance(self.number, len(self.ids), tuple(new), flying, budget)


def any_budget(chance: random.Random) -> Budget:
    depth = chance.choice([2, 9, 20])
    num_nodes = chance.choice([0, 0, 1, depth])
    return Budget(num_nodes, depth, chance.choice([0, 4, 60]), chance.choice([0, 3]) if num_nodes else 0)


@pytest.mark.parametrize("seed", range(8))
def test_a_draft_sends_no_more_than_its_advances_allow(seed: int) -> None:
    chance = random.Random(seed)
    engine = DraftEngine(TableDrafter(Table(acceptance=0.9)))
    spec, budget = SequenceSpec((1, 2, 3), 3, SamplingParams(0.0), 0, Method.COUPLED), any_budget(chance)
    engine.open(KEY, DraftOpen(spec, budget))
    caller, num_nodes = Caller(chance, budget), 0
    for _ in range(200):
        for _ in range(chance.choice([0, 1, 3, 30])):
            for _, growth in [] if engine.idle else engine.step():
                num_nodes += len(growth.tree)
                caller.left -= size_of_growth(write_growth(1, growth))
                assert caller.left >= 0
                if growth.base == len(caller.ids):
                    caller.tree = caller.tree.merge(growth.tree.under(growth.path))
        engine.submit(KEY, caller.advance())
    assert num_nodes > 1000
