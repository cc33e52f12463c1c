"""A target's head drafts as many nodes as give the most tokens per second, and none where none pays."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orchestrator.control.cost_model import CostModel
from orchestrator.control.self_draft_length import PROBE_EVERY, PROBE_ROUNDS, START_NODES, SelfDraftLength
from orchestrator.rounds import Exchange, RoundRecord, Source
from specdec.core.rounds import Timings
from specdec.core.tree import TokenTree

GOOD = [1.0, 1.8, 2.4, 2.9, 3.3, 3.6, 3.8, 4.0, 4.1]
BAD = [1.0 + 0.02 * number for number in range(9)]


def after_rounds(
    row_us: int, node_us: int, pass_us: int = 10_000, chances: Sequence[float] = (), accepted: int = 0, times: int = 6
) -> SelfDraftLength:
    """The policy once it has seen rounds of 0 to 8 nodes, in which a row and a drafted node take so long. Of nodes with
    these ``chances`` the first ones were accepted."""
    costs = CostModel()
    policy = SelfDraftLength(costs, 8)
    for number in (0, 3, 0, 8, 0, 1, 5) * times:
        tree = TokenTree.chain(range(number))
        timings = Timings(
            pass_us=pass_us + row_us * number, rows=1 + number, sequences=1, self_draft_us=node_us * number
        )
        source = Source.SELF_DRAFT if number else None
        nodes = tuple(range(min(accepted, number)))
        record = RoundRecord(1, 5, tree, source, accepted=nodes, timings=timings, exchange=Exchange())
        costs.observe(record)
        policy.observe(record, chances)
    return policy


def test_at_first_a_few_nodes_are_tried():
    assert SelfDraftLength(CostModel(), 8).choose(GOOD) == (START_NODES, 0.0)
    assert SelfDraftLength(CostModel(), 2).choose(GOOD) == (2, 0.0)


@pytest.mark.parametrize(
    ("row_us", "node_us", "nodes"), [(0, 0, {8}), (300, 200, {6, 7, 8}), (2_000, 1_000, {2, 3, 4})]
)
def test_the_number_with_the_most_tokens_per_second_is_chosen(row_us: int, node_us: int, nodes: set[int]):
    number, rate = after_rounds(row_us, node_us).choose(GOOD)
    assert number in nodes
    expected = GOOD[number] / (10_000 + (row_us + node_us) * number) * 1e6
    assert rate == pytest.approx(expected, rel=0.1)


def test_where_no_number_pays_none_is_drafted_but_now_and_then():
    policy = after_rounds(2_000, 1_000)
    drafted = []
    for _ in range(2 * PROBE_EVERY):
        drafted.append(policy.choose(BAD)[0])
        policy.observe(RoundRecord(1, 5, timings=Timings(pass_us=10_000, rows=1, sequences=1)), ())
    assert drafted.count(START_NODES) == 2 * PROBE_ROUNDS
    assert set(drafted) == {0, START_NODES}


def test_a_method_of_which_less_comes_true_than_its_ranks_promise_is_not_used():
    assert after_rounds(300, 200).choose(GOOD)[0]
    assert after_rounds(300, 200, chances=[0.8] * 8, times=150).choose(GOOD)[1] == 0.0


def test_what_comes_true_near_the_root_is_drafted_whatever_long_ones_miss():
    assert after_rounds(300, 200).choose(GOOD)[0] > 5
    policy = after_rounds(300, 200, chances=[0.8] * 8, accepted=3, times=60)
    number, rate = policy.choose(GOOD)
    assert number == 3
    assert rate == pytest.approx((1 + 1.9 / 0.8) / (10_000 + 3 * 500) * 1e6, rel=0.1)


def test_a_method_with_trees_of_one_size_has_that_size_or_none():
    assert SelfDraftLength(CostModel(), 8).choose([1.0] * 20, only=15) == (15, 0.0)
    assert after_rounds(0, 0).choose([1.0 + 0.1 * number for number in range(16)], only=15)[0] == 15
    policy = after_rounds(2_000, 1_000)
    drafted = set()
    for _ in range(PROBE_EVERY):
        drafted.add(policy.choose([1.0] * 16, only=15)[0])
        policy.observe(RoundRecord(1, 5, timings=Timings(pass_us=10_000, rows=1, sequences=1)), ())
    assert drafted == {0, 15}
