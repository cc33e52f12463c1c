"""A round that is sent before the verdict on the one before it: what becomes of it."""

from __future__ import annotations

import pytest

from specdec.core.errors import Draining, OutOfStep, Preempted
from specdec.core.rounds import Round
from specdec.core.sequence import Method, SamplingParams
from specdec.core.tree import ROOT, TokenTree
from tests.models.fake_target import CONTEXT, VOCAB, A, B, chain, opened, run, said, text_of

TEXT = said([1, 2], CONTEXT)


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


def forked() -> TokenTree:
    """From base 3: the first token as it will be and as it will not, and three more below each."""
    tokens = (TEXT[1], wrong(TEXT[1]), TEXT[2], 0, TEXT[3], 0, TEXT[4], 0)
    return TokenTree(tokens, (ROOT, ROOT, 0, 1, 2, 3, 4, 5))


def test_the_target_goes_on_with_what_is_left_of_its_tree():
    engine, verifier = opened()
    engine.submit(A, Round(1, 3, chain([TEXT[1]])))  # commits two tokens
    engine.submit(A, Round(2, 3, forked()))
    first, second = run(engine)
    assert (first.round, first.base, first.accepted, first.dropped) == (1, 3, (0,), 0)
    assert verifier.jobs[-1][0].tree == chain([TEXT[3], TEXT[4]])
    assert (second.round, second.base, second.accepted) == (2, 5, (4, 6)), "nodes of the tree as it was sent"
    assert text_of(engine) == [1, 2, *TEXT[:6]]
    engine.submit(A, Round(3, 8))
    assert [verdict.round for verdict in run(engine)] == [3]


def test_it_is_dropped_if_nothing_is_left_and_its_number_is_free():
    engine, verifier = opened()
    engine.submit(A, Round(1, 3))
    engine.submit(A, Round(2, 3, chain([wrong(TEXT[1]), 0, 0])))
    [verdict] = run(engine)
    assert (verdict.round, verdict.dropped) == (1, 2)
    assert len(verifier.jobs) == 2, "nothing was computed for it"
    engine.submit(A, Round(2, 4, chain([TEXT[2]])))
    assert [(verdict.round, verdict.accepted) for verdict in run(engine)] == [(2, (0,))]


def test_a_tree_that_ends_where_the_text_has_come_to_is_dropped_too():
    engine, _ = opened()
    engine.submit(A, Round(1, 3))
    engine.submit(A, Round(2, 3, chain([TEXT[1]])))
    assert [verdict.dropped for verdict in run(engine)] == [2]


def test_one_that_comes_after_the_verdict_stands_whatever_is_left():
    """Who sent it does not know yet that it is too late, and reads of no drop."""
    engine, _ = opened()
    engine.submit(A, Round(1, 3))
    engine.step()
    engine.submit(A, Round(2, 3, chain([wrong(TEXT[1]), 0])))
    assert [(verdict.round, verdict.base, verdict.accepted) for verdict in run(engine)] == [(2, 4, ())]


@pytest.mark.parametrize(("max_nodes", "accepted"), [(0, (4, 6)), (1, (4,)), (2, (4, 6)), (9, (4, 6))])
def test_of_what_is_left_the_first_nodes_are_verified(max_nodes, accepted):
    engine, verifier = opened()
    engine.submit(A, Round(1, 3, chain([TEXT[1]])))
    engine.submit(A, Round(2, 3, forked(), max_nodes=max_nodes))
    assert [verdict.accepted for verdict in run(engine)] == [(0,), accepted]
    assert len(verifier.jobs[-1][0].tree) == len(accepted)


def test_it_may_be_sent_with_the_open():
    engine, _ = opened(first=False)
    engine.submit(A, Round(1, 2, chain(TEXT[:3])))
    assert [(verdict.round, verdict.accepted) for verdict in run(engine)] == [(0, ()), (1, (1, 2))]


def test_it_ends_what_comes_unasked():
    engine, _ = opened()
    engine.submit(A, Round(1, 3, run_on=9))
    engine.submit(A, Round(2, 3, chain(TEXT[1:4])))
    assert [(verdict.round, verdict.run_on) for verdict in run(engine)] == [(1, 0), (2, 0)]


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK, Method.COUPLED])
def test_more_than_one_an_empty_one_or_one_with_distributions_is_out_of_step(method):
    engine, _ = opened(method=method, sampling=SamplingParams(1.0))
    engine.submit(A, Round(1, 3))
    if method is Method.COUPLED:
        engine.submit(A, Round(2, 3, chain([1])))
        with pytest.raises(OutOfStep, match="round 1 is unanswered"):
            engine.submit(A, Round(3, 3, chain([1])))
        return
    for tree in (chain([]), chain([1])):
        with pytest.raises(OutOfStep, match="round 1 is unanswered"):
            engine.submit(A, Round(2, 3, tree))


def test_it_may_come_during_the_pass_before_it():
    """As it does as a rule: it is sent when that is nearly over."""
    engine, _ = opened()
    engine.submit(A, Round(1, 3))
    [(_, first)] = engine.step(lambda: engine.submit(A, Round(2, 3, chain([wrong(TEXT[1]), 0]))))
    assert (first.round, first.dropped) == (1, 2)
    engine.submit(A, Round(2, 4))
    [(_, second)] = engine.step(lambda: engine.submit(A, Round(3, 4, chain(TEXT[2:5]))))
    assert (second.round, second.dropped) == (2, 0)
    assert [(verdict.round, verdict.accepted) for verdict in run(engine)] == [(3, (1, 2))]


def test_what_comes_meanwhile_for_a_sequence_that_goes_on_unasked_is_of_the_time_after():
    engine, _ = opened()
    opened(key=B, engine=engine)
    for key in (A, B):
        engine.submit(key, Round(1, 3, run_on=9))
    engine.step()

    def look() -> None:
        engine.submit(A, Round(2, 4, chain(TEXT[2:5])))
        engine.submit(B, Round(7, 4))

    results = engine.step(look)
    assert [(key, result.round, result.base) for key, result in results[:2]] == [(A, 1, 4), (B, 1, 4)]
    [(key, error)] = results[2:]
    assert key == B
    assert isinstance(error, OutOfStep)
    assert [(verdict.round, verdict.base, verdict.accepted) for verdict in run(engine)] == [(2, 5, (1, 2))]
    assert text_of(engine) == [1, 2, *TEXT[:6]]


def test_who_is_closed_meanwhile_is_told_nothing():
    engine, verifier = opened()
    engine.submit(A, Round(1, 3))
    assert engine.step(lambda: engine.close(A)) == []
    assert engine.idle
    assert not verifier.live


def test_its_number_is_the_next_one():
    engine, _ = opened()
    engine.submit(A, Round(1, 3))
    with pytest.raises(OutOfStep, match="round 2 was expected, not 3"):
        engine.submit(A, Round(3, 3, chain([1])))


def test_a_stop_token_drops_it():
    engine, _ = opened(stop_token_ids=frozenset({TEXT[1]}))
    engine.submit(A, Round(1, 3))
    engine.submit(A, Round(2, 3, chain(TEXT[1:4])))
    assert [verdict.dropped for verdict in run(engine)] == [2]


def test_a_target_that_drains_does_not_wait_for_its_end():
    """Or a request that always sends in time would keep it from draining."""
    engine, _ = opened()
    engine.submit(A, Round(1, 3))
    engine.submit(A, Round(2, 3, chain(TEXT[1:4])))
    engine.drain()
    (_, verdict), (_, error) = engine.step()
    assert (verdict.round, verdict.dropped) == (1, 2)
    assert isinstance(error, Draining)


def test_it_ends_with_its_sequence():
    engine, verifier = opened()
    opened(key=B, engine=engine)
    for key in (A, B):
        engine.submit(key, Round(1, 3))
        engine.submit(key, Round(2, 3, chain(TEXT[1:4])))
    engine.close(A)
    verifier.live[0]["outcomes"].append(Preempted("planted"))
    [(key, error)] = engine.step()
    assert key == B
    assert isinstance(error, Preempted)
    assert engine.idle
    assert not verifier.live
