"""How much to draft, how few drafts suffice and the sustainable rate, in cases with a known answer."""

from __future__ import annotations

import dataclasses

import pytest

from specdec.planner.pass_time import PassTime
from specdec.planner.scenario import Pair, Paths
from specdec.planner.sizing import Demand, Sizing

DEMAND = Demand(
    pair=Pair(PassTime.line(0.02), PassTime.line(0.001), 0.8),
    paths=Paths(),
    prompt=1,
    output=15,
    spread=0.5,
    rate=None,
    streams=4,
    max_live=8,
    num_ahead_tokens=0,
    drafts=None,
)


def size(targets=1, cell=4, **changes):
    return Sizing(dataclasses.replace(DEMAND, **changes), cell).size(targets)


def test_nothing_is_drafted_where_nothing_is_accepted():
    found = size(pair=Pair(PassTime.line(0.02), PassTime.line(0.001), 0.0))
    assert (found.drafting.num_draft_tokens, found.drafts) == (0, 0)


def test_the_further_the_draft_the_more_it_drafts_at_a_time_until_it_does_not_pay():
    pair = Pair(PassTime.line(0.02), PassTime.line(0.003), 0.8)
    paths = map(Paths, (0.0, 0.03, 0.5))
    near, far, too_far = (size(pair=pair, streams=1, paths=each).drafting.num_draft_tokens for each in paths)
    assert 0 < near < far
    assert too_far == 0


def test_rows_that_cost_much_are_not_drafted():
    """Four streams share what the target can do: then a row that is rejected is a row less for the others."""
    dear = Pair(PassTime.line(0.001, 0.01), PassTime.line(0.001), 0.5)
    assert size(pair=dear).drafting.num_draft_tokens == 0


def test_growing_ahead_is_chosen_where_the_draft_is_slow_and_predicts_the_verdicts():
    slow = Pair(PassTime.line(0.02), PassTime.line(0.004), 0.8, runner_up=0.9)
    found = size(pair=slow, num_ahead_tokens=60, streams=1)
    assert found.drafting.num_ahead_tokens == 60
    assert found.outcome.foreseen > 0.5


def test_a_draft_with_steps_that_are_free_for_many_serves_several_targets():
    pairs = [Pair(PassTime.line(0.02), PassTime.line(*step), 0.8) for step in ((1e-4,), (1e-4, 1e-3))]
    free, busy = (size(4, pair=pair).drafts for pair in pairs)
    assert free == 1 < busy
    assert size(4, drafts=0.75).drafts == 3


def test_it_breaks_where_all_are_busy_and_each_asks_for_more():
    """Eight sequences at a time, a pass of 20 ms for each of 40 tokens: 10 requests per second."""
    alone = size(pair=Pair(PassTime.line(0.02), PassTime.line(0.001), 0.0), spread=0.0, output=40)
    assert alone.alone_breaks_at == pytest.approx(10.0, rel=0.1)
    assert alone.breaks_at == alone.alone_breaks_at


def test_more_targets_than_a_cell_are_so_many_cells_and_each_is_simulated_once():
    noted: list[str] = []
    sizing = Sizing(DEMAND, 2, noted.append)
    small, num_noted = sizing.size(2), len(noted)
    large = sizing.size(1000)
    assert len(noted) == num_noted > 0
    assert (large.simulated_targets, large.scale) == (2, 500)
    assert large.outcome == small.outcome
    assert large.drafts == 500 * small.drafts
    assert large.breaks_at == pytest.approx(500 * small.breaks_at)


def test_a_rate_that_is_too_high_for_every_choice_still_has_an_answer():
    found = size(streams=None, rate=100.0)
    assert found.outcome.growth > 0.05
