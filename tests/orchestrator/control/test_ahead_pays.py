"""A draft that grows ahead: never slower than the target alone however far, slow, bad or dead it is, faster than one
that is waited for, and the same text. In simulated time, with the real loop, trie, controller and draft engine."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from orchestrator.control.controller import Fixed
from tests.orchestrator.control.far_draft import Outcome, Place, Shared, decoded

FAR = [0.0, 5.0, 20.0, 50.0, 200.0]


async def several(place: Place, **options: int) -> float:
    """How many times the target alone, of three texts the one in the middle."""
    outcomes = [await decoded(place, seed=seed, **options) for seed in range(3)]
    return statistics.median(outcome.tokens_per_s for outcome in outcomes) / place.alone


@pytest.mark.slow
@pytest.mark.parametrize("step_ms", [2.0, 16.0, 60.0])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.8, 0.95])
async def test_no_draft_however_far_is_slower_than_the_target_alone(acceptance, step_ms):
    for distance_ms in FAR:
        place = Place(acceptance, step_ms=step_ms, distance_ms=distance_ms)
        outcome = await decoded(place)
        print(distance_ms, outcome.tokens_per_s / place.alone)
        assert outcome.tokens_per_s >= 0.95 * place.alone


@pytest.mark.slow
@pytest.mark.parametrize("row_ms", [4.0, 40.0])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8])
async def test_nor_where_rows_are_dear(acceptance, row_ms):
    place = Place(acceptance, pass_ms=10.0, row_ms=row_ms, distance_ms=5.0)
    assert await several(place) >= 0.95


@pytest.mark.parametrize("dead_after", [0.0, 2000.0])
async def test_nor_one_that_falls_silent(dead_after):
    place = Place(dead_after=dead_after, distance_ms=5.0)
    outcome = await decoded(place, num_tokens=1200)
    assert outcome.tokens_per_s >= 0.95 * place.alone
    assert outcome.waited_s < 5.0


@pytest.mark.slow
async def test_the_distance_of_a_good_draft_leaves_the_critical_path():
    near, far = Place(distance_ms=1.0), Place(distance_ms=20.0)
    ahead = {place: await several(place) for place in (near, far)}
    waiting = {place: await several(place, max_ahead=0) for place in (near, far)}
    print(ahead, waiting)
    assert ahead[far] > 0.85 * ahead[near] > waiting[near], "ahead is faster even where waiting takes no time"
    assert ahead[far] > 1.3 * waiting[far]


@pytest.mark.slow
async def test_the_way_to_the_target_leaves_it_too():
    place = Place(beyond_ms=8.0, distance_ms=5.0)
    early, asked = await several(place), await several(place, takes_early=False)
    print(early, asked)
    assert early > 1.1 * asked


@pytest.mark.slow
async def test_a_draft_that_is_right_less_than_every_other_time_still_pays():
    """Because it grows wide, and because nobody waits for it."""
    for distance_ms in (0.0, 20.0):
        place = Place(0.45, distance_ms=distance_ms)
        assert await several(place) > 1.5
        assert await several(place) > 1.2 * await several(place, max_ahead=0)


async def test_a_draft_beyond_the_length_of_a_pass_pays_as_long_as_nobody_waits_for_it():
    place = Place(0.8, distance_ms=50.0)
    outcome = await decoded(place)
    assert outcome.tokens_per_s > 1.6 * place.alone
    assert outcome.waited_s < 0.2 * 600 / place.alone


@pytest.mark.parametrize("acceptance", [0.3, 0.8])
async def test_the_text_is_the_targets_at_any_distance(acceptance):
    texts = {tuple((await decoded(Place(acceptance, distance_ms=distance), 200)).token_ids) for distance in FAR}
    texts.add(tuple((await decoded(Place(acceptance), 200, num_draft_tokens=0)).token_ids))
    assert len(texts) == 1


async def test_a_second_request_knows_what_the_first_has_learnt():
    place, shared = Place(0.8, distance_ms=20.0), Shared(ahead=True)
    first = await decoded(place, 100, shared=shared)
    second = await decoded(place, 100, shared=shared)
    assert second.tokens_per_s > first.tokens_per_s


@pytest.mark.slow
async def test_the_choice_between_waiting_and_going_on_is_close_to_the_better_one():
    """Neither is best everywhere: near by a wait is short, far away it is not."""
    for distance_ms in (0.0, 5.0, 20.0, 50.0):
        place = Place(0.8, distance_ms=distance_ms)
        waits: list[Outcome] = [await decoded(place, seed=seed, controller=Fixed(4)) for seed in range(3)]
        always = statistics.median(outcome.tokens_per_s for outcome in waits) / place.alone
        chosen = await several(place)
        print(distance_ms, always, chosen)
        assert chosen > 0.97 * always


@pytest.mark.slow
async def test_what_other_texts_found_foreseen_does_not_make_this_one_wait():
    place = Place(0.7, pass_ms=26.0, row_ms=1.2, step_ms=3.6, distance_ms=20.0, beyond_ms=2.0)
    after, fresh = [], []
    for rates, others in ((after, 0.93), (fresh, 0.7)):
        shared = Shared(ahead=True)
        for seed in range(6):
            await decoded(replace(place, acceptance=others), 200, shared=shared, seed=100 + seed)
            rates.append((await decoded(place, 160, shared=shared, seed=seed)).tokens_per_s / place.alone)
    print(after, fresh)
    assert statistics.mean(after) > 0.96 * statistics.mean(fresh)


async def test_a_draft_that_moves_away_is_still_used_where_it_pays():
    """A way of 50 ms makes one token cost 13 times as much as before, and eight only twice."""
    shared = Shared(ahead=False)
    means = {}
    for distance_ms in (0.0, 20.0, 50.0):
        place, rates = Place(0.8, distance_ms=distance_ms), []
        for seed in range(10):
            outcome = await decoded(place, 120, max_ahead=0, shared=shared, seed=seed)
            rates.append(outcome.tokens_per_s / place.alone)
        means[distance_ms] = statistics.mean(rates)
    print(means)
    assert means[20.0] > 1.85
    assert means[50.0] > 1.25


@pytest.mark.slow
async def test_a_draft_that_comes_nearer_is_noticed():
    shared = Shared(ahead=True)
    far, near = Place(0.8, distance_ms=400.0), Place(0.8, distance_ms=2.0)
    await decoded(far, 400, shared=shared)
    fresh = await decoded(near, 1600, seed=1)
    after = await decoded(near, 1600, shared=shared, seed=1)
    assert after.tokens_per_s > 0.75 * fresh.tokens_per_s
