"""What is made of measurements: which are believed, which are accidents, and what is concluded where there are none."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from orchestrator.control.costs import Costs
from specdec.core.rounds import Timings


def known(most: int = 8, ahead: bool = False) -> Costs:
    costs = Costs(most, ahead)
    for number in range(40):
        depth = number % 3
        if depth:
            costs.drafted(depth, 0.002 * depth + 0.001)
        costs.verified(depth, 0.0205, Timings(0, 20_000 + number, 0, depth + 1, 1), 1, 1)
    return costs


def test_a_round_is_its_draft_and_its_pass():
    """Without drafts a pass alone: the target goes on unasked."""
    rounds = known().rounds
    assert rounds[0] == pytest.approx(0.02, rel=0.02)
    assert rounds[2] - rounds[0] == pytest.approx(0.0055, rel=0.1)


def test_passes_with_prompts_say_nothing_of_rounds():
    costs, other = known(), known()
    for number in range(20):
        other.verified(0, 3.0, Timings(0, 3_000_000 + number, 0, 512, 2), 1, 2)
    assert other.rounds[0] == pytest.approx(costs.rounds[0], rel=0.1)


def test_the_verdicts_of_one_pass_count_once():
    one, many = known(), known()
    for number in range(10):
        timings = Timings(0, 40_000 + number, 0, 2, 2)
        one.verified(0, 0.0405, timings, 1, 2)
        for _ in range(16):
            many.verified(0, 0.0405, timings, 1, 2)
    assert many._passes.seconds(2) == one._passes.seconds(2)


def test_all_are_taken_to_draft_as_many():
    """16 sequences in a pass whose time grows with its rows: five times the rows take five times as long."""
    costs = Costs(8)
    for number in range(200):
        depth = number % 3
        if depth:
            costs.drafted(depth, 0.001 * depth)
        rows = 16 * (depth + 1)
        costs.verified(depth, 0.001 * rows, Timings(0, 1000 * rows + number % 2, 0, rows, 16), 1, 16)
    assert costs.rounds[4] / costs.rounds[0] > 4


def test_patience_follows_what_drafts_take_and_ends_where_waiting_cannot_pay():
    beginning = Costs(8)
    assert beginning.patience_s(4) == 1.0
    beginning.verified(0, 0.1, Timings(0, 100_000, 0, 1, 1), 1, 1)
    assert beginning.patience_s(4) == pytest.approx(0.2, rel=0.1), "what the target makes meanwhile is known"
    costs = known()
    assert costs.patience_s(4) == 0.05
    for number in range(20):
        costs.drafted(4, 0.03)
        costs.verified(4, 0.0205, Timings(0, 20_000 + number, 0, 5, 1), 1, 1)
    assert costs.patience_s(4) == pytest.approx(0.12, rel=0.15)
    for number in range(20):
        costs.late(4, costs.patience_s(4))
        costs.verified(0, 0.0205, Timings(0, 20_000 + number, 0, 1, 1), 1, 1)
    assert costs.patience_s(4) == pytest.approx(8 * 0.02, rel=0.1)


def test_a_round_gains_the_tokens_it_commits_beyond_those_of_the_target_alone_meanwhile():
    costs = known()
    assert costs.gain(3 * costs.alone_s, 5, costs.alone_s) == pytest.approx(2.0)
    assert costs.gain(3 * costs.alone_s, 1, costs.alone_s) == pytest.approx(-2.0)
    costs.verified(0, 0.0205, Timings(0, 20_000, 0, 1, 1), 1, 4)
    assert costs.gain(3.0, 5, 1.0) == pytest.approx(0.5), "of one of four it is a fourth of everybody's"


def test_figures_that_cannot_be_are_survived():
    costs = known()
    for timings in (Timings(), Timings(0, 0, 0, 5, 0), Timings(2**32 - 1, 2**32 - 1, 2**32 - 1, 1, 1)):
        costs.verified(3, 0.0, timings, -5, -1)
        costs.verified(0, 0.0, timings, 0, 0)
        costs.went_on(timings, 0)
        assert all(seconds > 0 for seconds in costs.rounds)
        assert math.isfinite(costs.gain(costs.rounds[1], 1, costs.alone_s))
    fresh = Costs(8)
    fresh.drafted(4, 0.01)
    fresh.drafted(1, 0.01)
    fresh.verified(0, 0.0, Timings(), 0, 0)
    assert not fresh.known


def far_away(costs: Costs, waits: bool) -> list[float]:
    """The draft takes 5 passes, which nobody ever gains from waiting for."""
    for number in range(40):
        depth = number % 3
        if depth:
            costs.drafted(depth, 0.1)
            costs.foreseen(not waits)
        costs.verified(depth, 0.0205, Timings(0, 20_000 + number, 0, depth + 1, 1), 1, 1)
    return costs.rounds


def test_growing_ahead_is_hoped_to_spare_the_wait_until_it_is_known():
    hopeful = Costs(8, ahead=True)
    hopeful.drafted(4, 0.1)
    hopeful.drafted(1, 0.1)
    for depth in (0, 1, 4):
        hopeful.verified(depth, 0.0205, Timings(0, 20_000, 0, depth + 1, 1), 1, 1)
    assert hopeful.rounds[4] < 0.08
    assert far_away(Costs(8), waits=True)[4] == pytest.approx(0.12, rel=0.05)
    assert far_away(Costs(8, ahead=True), waits=True)[4] > 0.1
    assert far_away(Costs(8, ahead=True), waits=False)[4] < 0.05


def test_who_waits_for_a_draft_waits_all_of_it_however_much_is_foreseen_as_a_rule():
    costs = known(ahead=True)
    for _ in range(200):
        costs.foreseen(True)
    assert costs.rounds[4] - costs.rounds[0] == pytest.approx(0.0005, abs=0.0005), "hardly any round waits"
    assert costs.waited[4] - costs.rounds[0] == pytest.approx(0.0095, rel=0.1), "9 ms of drafting, 0.5 beyond the pass"


def test_a_time_is_never_nothing():
    costs = known()
    for number in range(200):
        costs.verified(4, 0.1, Timings(0, 1_000 * number, 0, 5, 1), 1, 1)
        costs.verified(0, 0.1, Timings(0, number % 2, 0, 1, 1), 1, 1)
        assert costs.rounds[0] > 0
        assert math.isfinite(costs.gain(costs.rounds[4], 1, costs.rounds[0]))


def with_siblings(num_siblings: int, rows_per_token: int, num_tokens: int = 4) -> Costs:
    """Rows are dear: what it takes depends on how many a draft token really has."""
    costs = Costs(8, num_siblings=num_siblings)
    for number in range(120):
        depth = (0, num_tokens, 1)[number % 3]
        num_nodes = depth * rows_per_token
        if depth:
            costs.drafted(depth, 0.002 * depth)
            costs.grown(num_nodes, depth)
        pass_s = 0.010 + 0.002 * (num_nodes + 1)
        timings = Timings(0, int(1e6 * pass_s) + number % 2, 0, num_nodes + 1, 1)
        costs.verified(num_nodes, pass_s + 0.0005, timings, 1, 1)
    return costs


def test_rows_are_those_that_trees_have_and_not_those_that_were_asked_for():
    """A draft without the capability sends no siblings."""
    without, asked_in_vain = with_siblings(0, 1).rounds, with_siblings(2, 1).rounds
    assert asked_in_vain == pytest.approx(without, rel=0.03)
    assert with_siblings(2, 3).rounds[4] == pytest.approx(without[4] + 8 * 0.002, rel=0.05)


def test_before_a_tree_was_seen_it_is_taken_to_have_what_was_asked_for():
    asked, none = Costs(8, num_siblings=2), Costs(8)
    for costs in (asked, none):
        for depth in (0, 4, 1):
            costs.drafted(max(1, depth), 0.002 * max(1, depth))
            costs.verified(depth, 0.03, Timings(0, 10_000 + 2_000 * (depth + 1), 0, depth + 1, 1), 1, 1)
    assert asked.rounds[4] > none.rounds[4] + 0.01


def test_chains_that_are_there_already_have_a_row_a_token():
    assert with_siblings(2, 3).unwaited[4] == pytest.approx(with_siblings(0, 1).unwaited[4], rel=0.05)


def test_rounds_are_worked_out_anew_when_the_load_changes():
    costs = known()
    for number in range(100):
        costs.verified(0, 0.0205, Timings(0, 20_000 + number, 0, 1, 1), 1, 1)
    before, num_loads = costs.rounds, costs.num_loads
    costs.went_on(Timings(0, 40_000, 0, 8, 8), 8)
    assert costs.rounds != before
    assert costs.num_loads == num_loads + 1


def test_targets_with_about_as_many_sequences_are_the_same_load():
    costs = known()
    costs.went_on(Timings(0, 20_000, 0, 5, 5), 5)
    num_loads = costs.num_loads
    for number in range(20):
        of_one = 3 + 2 * (number % 2)
        costs.went_on(Timings(0, 20_000 + number, 0, of_one, of_one), of_one)
    assert costs.num_loads == num_loads


@pytest.mark.parametrize("waits", [True, False])
def test_who_goes_on_unasked_pays_for_the_rows_of_those_who_do_not(waits):
    costs = Costs(8, ahead=True)
    for number in range(400):
        depth = (0, 4, 1, 8)[number % 4]
        if depth:
            costs.drafted(depth, 0.004 * depth)
        timings = Timings(0, 20_000 + 2_000 * 32 * depth // 4, 0, 32 * (depth + 1), 32)
        costs.verified(depth, 0.0205 + timings.pass_us / 1e6, timings, 1, 32)
    costs.foreseen(True, waits=False)
    among = [costs.among_s(depth, waits) for depth in (0, 2, 4, 8)]
    assert among == sorted(among)
    assert among[-1] > 1.2 * among[0]


def many_rows(seconds: Callable[[int], float]) -> Costs:
    """32 sequences, whose passes take so long by their rows; some verify something at times."""
    costs = Costs(8)
    for number in range(400):
        rows = (32, 36, 32, 64, 32, 160)[number % 6]
        pass_us = int(1e6 * seconds(rows)) + number % 2
        costs.verified(4 * (rows > 32), seconds(rows), Timings(0, pass_us, 0, rows, 32), 1, 32)
    return costs


def test_a_guess_among_many_who_verify_nothing_is_charged_for_what_its_rows_cost_all():
    steep = many_rows(lambda rows: 0.150 + 0.002 * rows + 0.03 * (rows > 32))
    assert steep.guessed(drafting=False)[4] > steep.unwaited[0] + 20 * 0.03
    assert steep.guessed(drafting=True) == steep.unwaited, "where all verify something they share it"
    even = many_rows(lambda rows: 0.150 + 0.002 * rows)
    assert even.guessed(drafting=False)[4] == pytest.approx(even.unwaited[4], rel=0.15)


def test_a_guess_waits_with_the_others_for_their_drafts():
    costs = Costs(8)
    for number in range(40):
        depth = number % 3
        if depth:
            costs.drafted(depth, 0.01 * depth)
        rows = 4 * (depth + 1)
        costs.verified(depth, 0.03, Timings(0, 30_000 + number, 0, rows, 4), 1, 4)
    guessed = costs.guessed(drafting=True, awaited=2)
    assert guessed[2] == pytest.approx(costs.rounds[2], rel=0.01), "as one with a draft of so many"
    assert guessed[4] - costs.unwaited[4] == pytest.approx(0.02, rel=0.2)
    assert costs.guessed(drafting=True, awaited=1)[4] < guessed[4]


def test_a_round_that_waits_is_not_thought_longer_for_what_drafts_cost_others():
    """Only rows in passes that they are away from are beside a draft."""
    costs = Costs(8)
    for number in range(40):
        costs.drafted(1 + number % 2, 0.01)
        costs.verified(number % 3, 0.03, Timings(0, 30_000 + number, 0, 4 * (1 + number % 3), 4), 1, 4)
    costs.contention._logs[2] = -0.5
    costs._forget_rounds()
    assert costs.alone_s == pytest.approx(0.6 * 0.03, rel=0.1)
    assert costs.rounds[2] - costs._away_s(2, 1.0) == pytest.approx(costs.alone_s, rel=0.1)


def test_an_accident_of_a_draft_that_grew_for_many_at_a_time_is_one_accident():
    costs = Costs(8)
    for number in range(60):
        depth = (0, 4, 1)[number % 3]
        for _ in range(8 if depth else 0):
            costs.drafted(depth, 0.002 * depth if number < 59 else 0.1)
        costs.verified(depth, 0.0205, Timings(0, 20_000 + number, 0, 8 * (depth + 1), 8), 1, 8)
    assert costs.rounds[1] == pytest.approx(0.0225, rel=0.1)


def test_a_pass_with_more_rows_than_its_rounds_can_have_takes_in_a_prompt_and_tells_nothing():
    costs = known()
    before_s = costs.alone_s
    for number in range(20):
        costs.went_on(Timings(0, 400_000 + number, 0, 100, 4), 1)
    assert costs.alone_s == pytest.approx(before_s, rel=1e-3)


def test_what_keeps_the_few_of_a_trial_apart_would_not_keep_all_apart():
    costs, few = known(), known()
    few.few_draft = True
    for each in (costs, few):
        for number in range(20):
            each.verified(4, 0.06, Timings(0, 20_000 + number, 0, 8, 4), 3, 4)
    assert few.rounds[4] < 0.8 * costs.rounds[4]


@pytest.mark.parametrize(("way_s", "step_s"), [(0.06, 0.002), (0.0, 0.005)])
def test_drafts_are_compared_as_if_all_had_been_asked_for_one_node(way_s, step_s):
    """Of two that are alike, one that is asked for one node is no slower than one that is asked for eight."""
    costs = Costs(8)
    assert costs.draft_of_one_s(4, 0.04) == pytest.approx(0.01), "nothing is known: all of it may be steps"
    for num_nodes in (1, 8, 4, 2) * 20:
        costs.drafted(num_nodes, way_s + step_s * num_nodes)
        costs._growths.passed(1)
    for num_nodes in (1, 4, 8):
        took_s = way_s + step_s * num_nodes
        assert costs.draft_of_one_s(num_nodes, took_s) == pytest.approx(way_s + step_s, rel=0.1)
        assert costs.draft_of_one_s(num_nodes, 3 * took_s) == pytest.approx(3 * (way_s + step_s), rel=0.1)


@pytest.mark.parametrize("num_passes", [1, 2])
def test_a_guess_among_those_who_verify_nothing_is_charged_for_the_pass_that_it_misses(num_passes):
    costs = Costs(8)
    for number in range(80):
        rows = 4 if number % 8 else 8
        costs.verified(4 * (rows == 8), 0.03, Timings(0, 30_000 + number, 0, rows, 4), num_passes, 4)
    assert costs.guessed(drafting=False)[0] == pytest.approx(0.03 * num_passes, rel=0.15)
