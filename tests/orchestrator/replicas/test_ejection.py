"""How long a replica is left alone and mistrusted, and what its answers are worth, without a clock."""

from __future__ import annotations

from orchestrator.replicas.ejection import FIRST_EJECTION_S, MAX_EJECTION_S, Ejection
from orchestrator.replicas.load_score import LoadScore


def test_each_pause_is_twice_as_long_up_to_a_maximum_and_a_long_stream_makes_it_short_again() -> None:
    ejection, pauses_s = Ejection(), []
    for _ in range(8):
        pauses_s.append(ejection.pause_s)
        ejection.end_stream(lived_s=2 * ejection.pause_s)  # not long enough
        ejection.end_pause()
    assert pauses_s[:3] == [FIRST_EJECTION_S, 2 * FIRST_EJECTION_S, 4 * FIRST_EJECTION_S]
    assert pauses_s[-1] == ejection.pause_s == MAX_EJECTION_S
    ejection.end_stream(lived_s=2 * MAX_EJECTION_S + 1)
    assert ejection.pause_s == FIRST_EJECTION_S


def test_a_probation_ends_with_enough_answers() -> None:
    ejection = Ejection()
    assert not ejection.on_probation
    ejection.start_probation()
    for _ in range(63):
        ejection.count_answer()
    assert ejection.on_probation
    ejection.count_answer()
    ejection.count_answer()
    assert not ejection.on_probation


def test_a_wait_grows_with_latency_and_sequences() -> None:
    load = LoadScore()
    assert load.wait_s(3) == 4 * load.wait_s(0), "before any answer, the least busy one is the best"
    load.observe_latency(0.1, num_sequences=4)
    assert (load.latency_s, load.usual_sequences, load.wait_s(1)) == (0.1, 4, 0.2)
    for _ in range(200):
        load.observe_latency(0.3, num_sequences=8)
    assert 0.29 < load.latency_s < 0.3
    assert 7.9 < load.usual_sequences < 8
    assert load.num_observed == 201
