"""The target goes on unasked: how far, and what ends it."""

from __future__ import annotations

import pytest

from specdec.core.rounds import Round
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.server.step_loop import Key
from target_service.engine import _Sequence
from target_service.verifier import TargetOpen
from tests.models.fake_target import CONTEXT, A, chain, opened, run, said, text_of


@pytest.mark.parametrize("allowance", [0, 1, 5])
def test_run_on_says_as_many_tokens_as_were_allowed_and_repeats_the_round(allowance):
    engine, _ = opened()
    engine.submit(A, Round(1, 3, run_on=allowance))
    verdicts = run(engine)
    assert [verdict.round for verdict in verdicts] == [1] * (1 + allowance)
    assert [verdict.base for verdict in verdicts] == list(range(3, 4 + allowance))
    assert text_of(engine) == [1, 2, *said([1, 2], 2 + allowance)]


def test_run_on_has_an_end_whatever_is_allowed(monkeypatch):
    """A peer that allowed 2^32 tokens and read none of them once filled the memory."""
    monkeypatch.setattr("target_service.engine.MOST_RUN_ON", 6)
    engine, _ = opened()
    engine.submit(A, Round(1, 3, run_on=2**32 - 1))
    verdicts = run(engine)
    assert [verdict.run_on for verdict in verdicts] == [6, 5, 4, 3, 2, 1, 0]


def test_nothing_unasked_is_said_to_a_stream_that_is_held():
    engine, _ = opened()
    other = Key(2, 1)
    opened(key=other, engine=engine)
    for key in (A, other):
        engine.submit(key, Round(1, 3, run_on=4))
    engine.hold(A.stream, True)
    assert sorted(key for key, _ in engine.step()) == [A, other], "what was asked for"
    assert [key for _ in range(4) for key, _ in engine.step()] == [other] * 4
    assert engine.idle
    engine.hold(A.stream, False)
    assert [verdict.run_on for verdict in run(engine)] == [3, 2, 1, 0]
    assert text_of(engine) == [1, 2, *said([1, 2], 6)]


def test_a_new_round_ends_the_run_on():
    engine, _ = opened()
    engine.submit(A, Round(1, 3, run_on=9))
    engine.step()
    engine.step()
    engine.submit(A, Round(2, 5))
    assert [(verdict.round, verdict.base) for verdict in run(engine)] == [(2, 5)]


def test_what_came_while_a_round_was_on_its_way_is_of_what_it_allows():
    engine, _ = opened()
    engine.submit(A, Round(1, 3, run_on=9))
    for _ in range(4):
        engine.step()
    engine.submit(A, Round(2, 5, run_on=6))  # sent when two had come
    assert [(verdict.round, verdict.base, verdict.run_on) for verdict in run(engine)] == [
        (2, 7 + number, 4 - number) for number in range(5)
    ]
    engine.submit(A, Round(3, 5, run_on=6))
    assert [verdict.run_on for verdict in run(engine)] == [0], "and never less than nothing is left"


def test_run_on_stops_after_a_stop_token():
    stop = said([1, 2], 5)[4]
    engine, _ = opened(stop_token_ids=frozenset({stop}))
    engine.submit(A, Round(1, 3, run_on=9))
    run(engine)
    text = text_of(engine)[2:]
    assert text[-1] == stop
    assert stop not in text[1:-1]


def test_run_on_stops_after_a_stop_token_among_the_accepted():
    tokens = said([1, 2], 3)
    engine, _ = opened(stop_token_ids=frozenset({tokens[1]}))
    engine.submit(A, Round(1, 3, chain(tokens[1:]), run_on=9))
    assert len(run(engine)) == 1


def test_run_on_stops_at_the_end_of_the_context():
    engine, _ = opened([1] * (CONTEXT - 4))
    engine.submit(A, Round(1, CONTEXT - 3, run_on=1000))
    run(engine)
    assert len(text_of(engine)) == CONTEXT


def test_who_goes_on_unasked_or_was_asked_early_is_in_the_next_pass_too():
    sequence = _Sequence(TargetOpen(SequenceSpec((1,), 1, SamplingParams(0.0), 0)), None, [1], 0.0, 0.0)
    assert sequence.leaves
    for run_on, leaves in ((0, True), (1, False)):
        sequence.take(Round(1, 1, run_on=run_on))
        assert sequence.leaves is leaves
    sequence.answered()
    for run_on, leaves in ((2, False), (1, True)):
        sequence.run_on = run_on
        assert sequence.leaves is leaves
    sequence.early = Round(2, 1)
    assert not sequence.leaves
