"""The closed form against the simulator of rounds, and in cases with a known answer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.planner.deployment import Deployment, Drafting, Pair, Paths, Workload
from specdec.planner.pass_time import PassTime
from testing.round_simulation import Place, fixed, tokens_per_s

PASS_S, STEP_S = 0.020, 0.001
PAIR = Pair(PassTime.line(PASS_S), PassTime.line(STEP_S), 0.8)
ONE = Deployment(PAIR, Paths(), Workload(requests=1, prompt=1, output=100_000))


def expected_tokens(num_draft_tokens: int, acceptance: float = 0.8) -> float:
    return sum(acceptance**depth for depth in range(num_draft_tokens + 1))


@pytest.mark.parametrize("num_draft_tokens", [0, 2, 8])
@pytest.mark.parametrize("distance_ms", [0.0, 20.0])
@pytest.mark.parametrize("requests", [1, 4, 32])
@pytest.mark.parametrize("knee_rows", [200.0, 40.0])
def test_the_speed_is_that_of_the_simulator_of_rounds(knee_rows, requests, distance_ms, num_draft_tokens):
    place = Place(0.8, distance_ms=distance_ms, sequences=requests, knee_rows=knee_rows, noise=0.0)
    target = PassTime(tuple((rows, place.pass_s(int(rows))) for rows in (1.0, knee_rows, 4 * knee_rows)))
    paths = Paths(distance_ms / 1e3, place.overhead_ms / 1e3)
    deployment = Deployment(
        Pair(target, PassTime.line(place.step_ms / 1e3), 0.8), paths, Workload(requests, 1, 100_000)
    )
    simulated = tokens_per_s(fixed(place, num_draft_tokens))
    assert deployment.speed(Drafting(num_draft_tokens)).tokens_per_s == pytest.approx(simulated, rel=0.05)


def test_one_request_takes_passes_steps_and_messages():
    paths = Paths(round_trip_s=0.005, overhead_s=0.001, work_s=0.0005)
    speed = replace(ONE, paths=paths).speed(Drafting(4))
    round_s = 4 * STEP_S + 0.005 + 2 * 0.001 + 2 * 0.0005 + PASS_S
    assert speed.ms_per_token == pytest.approx(1e3 * round_s / expected_tokens(4))
    assert (speed.target_load, speed.draft_load) == pytest.approx((PASS_S / round_s, 4 * STEP_S / round_s))


@pytest.mark.parametrize("runner_up", [0.0, 0.5])
def test_growing_ahead_hides_the_draft_where_it_predicts_the_verdict(runner_up):
    """A hit is the token after the whole chain, or the second guess in place of a rejected one."""
    deployment = replace(ONE, pair=replace(PAIR, runner_up=runner_up), paths=Paths(round_trip_s=0.004))
    hit_rate = 0.8**5 + (1 - 0.8**5) * runner_up
    round_s = PASS_S + (1 - hit_rate) * (4 * STEP_S + 0.004)
    assert deployment.speed(Drafting(4, ahead=True)).tokens_per_s == pytest.approx(
        expected_tokens(4) / round_s, rel=1e-3
    )


def test_a_prompt_takes_passes_in_chunks_and_rows_next_to_the_others():
    alone = replace(ONE, workload=Workload(1, 2000, 2)).speed(Drafting())
    assert alone.request_s == pytest.approx((4 + 1) * PASS_S)
    dear = replace(PAIR, target=PassTime.line(PASS_S, 1e-4))
    short, long = (replace(ONE, pair=dear, workload=Workload(16, prompt, 256)).speed(Drafting()) for prompt in (1, 512))
    # One pass in 256 of each of 16 requests has 512 rows more.
    assert long.ms_per_token - short.ms_per_token == pytest.approx(16 / 256 * 51.2, rel=0.1)


def test_nothing_is_drafted_where_nothing_is_accepted_or_rows_cost_much():
    assert replace(ONE, pair=replace(PAIR, acceptance=0.0)).best() == Drafting()
    dear = replace(PAIR, target=PassTime.line(0.001, 0.01), acceptance=0.5)
    assert replace(ONE, pair=dear, workload=Workload(4, 1, 100)).best() == Drafting()


def test_the_further_the_draft_the_more_is_drafted_until_it_does_not_pay():
    pair = replace(PAIR, draft=PassTime.line(0.003))
    sizes = [replace(ONE, pair=pair, paths=Paths(distance_s)) for distance_s in (0.0, 0.03, 0.5)]
    near, far, too_far = (max(range(9), key=lambda number: size.speed(Drafting(number)).tokens_per_s) for size in sizes)
    assert 0 < near < far
    assert too_far == 0


def test_growing_ahead_is_chosen_where_the_draft_is_slow_and_predicts_the_verdicts():
    assert replace(ONE, pair=replace(PAIR, draft=PassTime.line(0.004), runner_up=0.9)).best().ahead


def test_a_draft_with_steps_that_are_free_for_many_serves_several_targets():
    pairs = [replace(PAIR, draft=PassTime.line(*step)) for step in ((1e-4,), (1e-4, 1e-3))]
    workload = Workload(4, 1, 100)
    free, busy = (replace(ONE, pair=pair, workload=workload, targets=4).with_fewest_drafts().drafts for pair in pairs)
    assert free == 1 < busy


def test_targets_with_drafts_of_their_own_add_up():
    one, many = (replace(ONE, targets=count, drafts=count).speed(Drafting(4)) for count in (1, 100))
    assert many.tokens_per_s == pytest.approx(100 * one.tokens_per_s)
    assert many.ms_per_token == pytest.approx(one.ms_per_token)
