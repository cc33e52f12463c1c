"""Laws of the simulator: where the answer is known it gives it, and nothing is lost on the way."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.planner.pass_time import PassTime
from specdec.planner.scenario import Deployment, Drafting, Pair, Paths, Scenario, Workload
from specdec.planner.simulation import Simulation, simulate

PASS_S, STEP_S = 0.020, 0.0005


DEFAULTS = dict(target=PassTime.line(PASS_S), draft=PassTime.line(STEP_S), acceptance=0.8, runner_up=0.5)
DEFAULTS |= dict(round_trip_s=0.0, overhead_s=0.0, work_s=0.0, prompt=1, output=20_000, requests=1, streams=1)
DEFAULTS |= dict(rate=None, spread=0.0, targets=1, drafts=1, max_live=256, seed=0)


def scenario(num_draft_tokens=0, ahead=0, **fields):
    assert fields.keys() <= DEFAULTS.keys()
    given = SimpleNamespace(**DEFAULTS | fields)
    streams = given.streams if given.rate is None else None
    return Scenario(
        Pair(given.target, given.draft, given.acceptance, given.runner_up),
        Paths(given.round_trip_s, given.overhead_s, given.work_s),
        Deployment(given.targets, given.drafts, given.targets, given.max_live),
        Workload(given.prompt, given.output, given.requests, given.rate, streams, given.spread),
        Drafting(num_draft_tokens, ahead),
        given.seed,
    )


def expected_tokens(acceptance, num_draft_tokens):
    return sum(acceptance**depth for depth in range(num_draft_tokens + 1))


@pytest.mark.parametrize(("num_draft_tokens", "round_trip_s"), [(1, 0.005), (4, 0.0), (8, 0.05)])
def test_one_stream_takes_what_the_formula_says(num_draft_tokens, round_trip_s):
    """algorithms: (K t_d + r + o + t_p) / E; o is the overhead of both exchanges and the work for both answers."""
    paths = dict(round_trip_s=round_trip_s, overhead_s=0.001, work_s=0.0005)
    found = simulate(scenario(num_draft_tokens, **paths, output=30_000))
    round_s = num_draft_tokens * STEP_S + round_trip_s + 2 * 0.001 + 2 * 0.0005 + PASS_S
    assert found.tokens_per_s == pytest.approx(expected_tokens(0.8, num_draft_tokens) / round_s, rel=0.01)


def test_the_target_alone_takes_a_pass_per_token():
    """It decodes autonomously: only the first two of all exchanges are waited for."""
    found = simulate(scenario(overhead_s=0.002, round_trip_s=0.5, output=100))
    assert found.request_s == pytest.approx(100 * PASS_S + 2 * 0.002)
    assert found.draft_use == 0


@pytest.mark.parametrize("round_trip_s", [0.0, 0.008])
def test_growing_ahead_hides_the_draft_where_it_predicts_the_verdict(round_trip_s):
    """h = a^(K+1) for the token after the whole chain, and the runner-up's share of all others."""
    found = simulate(scenario(4, 60, round_trip_s=round_trip_s, output=40_000))
    hit = 0.8**5 + (1 - 0.8**5) * 0.5
    away_s = (1 - hit) * (4 * STEP_S + STEP_S / 2 + round_trip_s)  # a step ahead under way is waited for
    assert found.foreseen == pytest.approx(hit, rel=0.02)
    assert found.tokens_per_s == pytest.approx(expected_tokens(0.8, 4) / (PASS_S + away_s), rel=0.02)


def test_growing_ahead_is_too_late_where_the_round_trip_is_longer_than_a_pass():
    near, far = (simulate(scenario(4, 60, round_trip_s=way_s, output=8_000)) for way_s in (0.0, 0.1))
    assert far.foreseen < near.foreseen
    assert far.tokens_per_s < near.tokens_per_s / 1.5


def test_a_draft_that_never_guesses_right_leaves_the_target_alone():
    alone = simulate(scenario(output=500))
    free = simulate(scenario(4, acceptance=0.0, draft=PassTime.line(1e-12), output=500))
    dear = simulate(scenario(4, acceptance=0.0, output=500))
    assert free.tokens_per_s == pytest.approx(alone.tokens_per_s, rel=1e-6)
    # A token of 499 at a time; the last comes from the target, so the rounds before it draft 3, 2, 1 and none.
    assert 499 * dear.per_token_s[0] == pytest.approx(499 * PASS_S + (495 * 4 + 3 + 2 + 1) * STEP_S, rel=1e-6)


def test_a_draft_that_is_always_right_gives_all_it_drafts():
    found = simulate(scenario(4, acceptance=1.0, output=1 + 5 * 200))
    assert found.per_token_s[0] == pytest.approx((PASS_S + 4 * STEP_S) / 5, rel=0.01)


def test_a_saturated_target_gives_what_its_rows_allow():
    target = PassTime.line(1e-4, 1e-3)
    alone = simulate(scenario(target=target, output=200, streams=128, requests=128))
    drafted = simulate(scenario(4, target=target, output=400, streams=128, requests=128))
    assert alone.tokens_per_s == pytest.approx(1 / 1e-3, rel=0.01)
    # 5 rows give E tokens, and no more: then speculation costs throughput.
    bound = expected_tokens(0.8, 4) / 5e-3
    assert 0.85 * bound < drafted.tokens_per_s < 1.02 * bound
    assert alone.target_use == pytest.approx(1.0, abs=0.01)


def test_streams_share_a_pass():
    one, many = (simulate(scenario(output=1000, streams=count, requests=count)) for count in (1, 32))
    assert many.tokens_per_s == pytest.approx(32 * one.tokens_per_s, rel=0.01)
    assert many.rows_per_pass == pytest.approx(32, rel=0.01)


def test_a_pass_waits_for_sequences_that_are_about_to_return():
    """The first is alone in its pass while all others arrive: the two groups do not take turns for ever."""
    found = simulate(scenario(1, acceptance=1.0, overhead_s=1e-4, output=2001, streams=32, requests=32))
    assert found.rows_per_pass > 0.9 * 64
    assert found.tokens_per_s == pytest.approx(2 * 32 / (PASS_S + STEP_S), rel=0.05)


def test_a_long_prompt_is_fed_in_chunks_beside_the_others():
    found = simulate(scenario(prompt=2000, output=2))
    assert found.first_token_s[0] == pytest.approx(4 * PASS_S)


def test_a_request_that_finds_no_room_waits():
    found = Simulation(scenario(output=100, streams=2, requests=2, max_live=1))
    found.run()
    first, second = found.requests
    assert second.first > first.ended
    assert second.arrived == 0


def test_the_queue_grows_only_above_what_the_deployment_can_do():
    most = 4 / PASS_S / 50  # requests per second: four at a time, 50 tokens each
    below, above = (
        simulate(scenario(output=50, requests=400, rate=share * most, max_live=4)).growth for share in (0.8, 1.3)
    )
    assert below < 0.05 < above


def test_the_same_seed_gives_the_same_numbers():
    busy = scenario(4, 60, rate=8.0, requests=60, output=60, spread=0.5, targets=3, drafts=2)
    assert simulate(busy) == simulate(busy)
    assert simulate(busy) != simulate(dataclasses.replace(busy, seed=1))


@settings(max_examples=60, deadline=None)
@given(
    num_draft_tokens=st.integers(0, 8),
    ahead=st.sampled_from([0, 7, 60]),
    acceptance=st.sampled_from([0.0, 0.6, 1.0]),
    runner_up=st.sampled_from([0.0, 0.5, 1.0]),
    round_trip_s=st.sampled_from([0.0, 0.003, 0.07]),
    work_s=st.sampled_from([0.0, 0.0004]),
    prompt=st.sampled_from([1, 700]),
    output=st.integers(1, 30),
    requests=st.integers(1, 40),
    rate=st.sampled_from([None, 20.0]),
    streams=st.integers(1, 12),
    targets=st.integers(1, 3),
    drafts=st.integers(1, 3),
    max_live=st.sampled_from([1, 256]),
    seed=st.integers(0, 99),
)
def test_every_request_ends_once_and_gets_all_its_tokens(**fields):
    simulation = Simulation(scenario(spread=0.5, overhead_s=0.001, **fields))
    found = simulation.run()
    assert len(simulation.requests) == fields["requests"]
    assert found.num_ended <= fields["requests"] == simulation.num_ended
    for request in simulation.requests:
        assert request.left == 0
        assert request.arrived < request.first <= request.ended
    assert simulation.num_tokens == sum(request.output for request in simulation.requests)
    assert not any(replica.live for replica in simulation.replicas)
    assert 0 <= found.foreseen <= 1
