"""The protocol of advances and budgets, with a drafter that is plain Python: no gRPC, no torch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draft_service.budgets import granted
from draft_service.drafter import Node
from draft_service.engine import DraftOpen
from specdec.core.errors import Draining, InvalidArgument, OutOfStep, Overloaded
from specdec.core.rounds import Advance, Budget, Growth, GrowthEnd
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import SparseDistribution, TokenTree
from specdec.server.step_loop import Key
from tests.models.fake_draft import CONTEXT, VOCAB, A, B, FakeDrafter, budget, chain, growths, opened, run, said

# --- growing ------------------------------------------------------------------------------------------------


def test_an_open_without_budget_is_answered_and_its_prompt_taken_in():
    engine, drafter = opened()
    assert growths(engine) == [Growth(0, 2, (), TokenTree(), GrowthEnd.BUDGET)]
    assert drafter.learnt == [[[1, 2]]]
    assert drafter.grown == []


def test_an_advance_without_budget_is_answered_at_once_and_taken_in_when_nobody_grows():
    engine, drafter = opened()
    opened(key=B, engine=engine)
    run(engine)
    drafter.learnt.clear()
    engine.submit(A, Advance(1, 4, (7, 8), budget=budget(0)))
    engine.submit(B, Advance(1, 3, (9,), budget=budget(2)))
    assert [key for key, _ in run(engine)] == [A, B]
    assert [text for grown in drafter.grown for text, _ in grown] == [[1, 2, 9]] * 2
    assert drafter.learnt == [[[1, 2, 7, 8]]]


def test_who_finds_no_room_in_a_pass_is_in_the_next_one(monkeypatch):
    monkeypatch.setattr("draft_service.engine.MAX_TREE_ROWS", 3)
    engine, drafter = opened(nodes=2)
    keys = [A, *(Key(1, number) for number in range(2, 9))]
    for key in keys[1:]:
        opened(key=key, engine=engine, nodes=2)
    assert sorted(key for key, _ in run(engine)) == keys
    assert max(map(len, drafter.grown)) == 3
    assert len(drafter.grown) == 6


@pytest.mark.parametrize(("method", "most"), [(Method.COUPLED, 1024), (Method.BLOCK, 64)])
def test_no_budget_is_larger_than_what_a_peer_takes(method, most):
    spec = SequenceSpec((1, 2), 2, SamplingParams(1.0), 0, method)
    asked = Budget(max_nodes=1 << 32 - 1, max_depth=1 << 32 - 1)
    assert granted(spec, asked, FakeDrafter().info).max_nodes == most


def test_an_open_with_budget_grows_before_the_first_token_is_known():
    engine, _ = opened(nodes=3)
    assert growths(engine) == [Growth(0, 2, (), chain(said([1, 2], 3)), GrowthEnd.BUDGET)]


@given(st.integers(0, 6), st.integers(0, 6))
def test_a_growth_keeps_to_the_nodes_and_the_depth_allowed(nodes, depth):
    engine, drafter = opened()
    run(engine)
    engine.submit(A, Advance(1, 3, (7,), budget=budget(nodes, depth)))
    [growth] = growths(engine)
    assert growth == Growth(1, 3, (), chain(said([1, 2, 7], min(nodes, depth))), GrowthEnd.BUDGET)
    assert len(drafter.grown) == min(nodes, depth), "no pass for a node nobody may use"


def test_a_drafter_that_grows_a_level_of_several_nodes_keeps_to_the_budget():
    engine, drafter = opened()
    run(engine)

    def level(sequence):
        leaves = [n for n, d in enumerate(sequence.tree.depths) if d == max(sequence.tree.depths)] or [-1]
        return [Node(leaf, token) for leaf in leaves for token in (1, 2)]

    drafter.grow_with = level
    engine.submit(A, Advance(1, 3, (7,), budget=budget(5, 9)))
    [growth] = growths(engine)
    assert growth.tree == TokenTree((1, 2, 1, 2, 1), (-1, -1, 0, 0, 1))


def test_nothing_likely_ends_the_growth():
    engine, drafter = opened()
    run(engine)
    drafter.grow_with = lambda sequence: drafter.one(sequence) if len(sequence.tree) < 2 else []
    engine.submit(A, Advance(1, 3, (7,), budget=budget(5)))
    assert growths(engine) == [Growth(1, 3, (), chain(said([1, 2, 7], 2)), GrowthEnd.UNLIKELY)]


def test_all_that_have_budget_share_a_pass():
    engine, drafter = opened()
    opened([5, 6], key=B, engine=engine)
    run(engine)
    engine.submit(A, Advance(1, 3, (7,), budget=budget(3)))
    engine.submit(B, Advance(1, 3, (8,), budget=budget(1)))
    assert engine.load.waiting_sequences == 2
    results = dict(run(engine))
    assert [len(each) for each in drafter.grown] == [2, 1, 1]
    assert results[A].tree == chain(said([1, 2, 7], 3))
    assert results[B].tree == chain(said([5, 6, 8], 1))
    load = engine.load
    assert (load.live_sequences, load.waiting_sequences) == (2, 0)
    assert (load.kv_slots_used, load.kv_slots_total, load.passes) == (3, 5, len(drafter.grown) + len(drafter.learnt))


def test_who_has_budget_goes_before_who_only_takes_in_a_prompt():
    engine, drafter = opened(nodes=2)
    opened([5, 6], key=B, engine=engine)
    run(engine)
    assert all(len(each) == 1 for each in drafter.grown)
    assert drafter.learnt == [[[5, 6]]]


# --- what is kept from one advance to the next --------------------------------------------------------------


def test_what_matches_is_kept_and_grown_on():
    engine, drafter = opened(nodes=4)
    run(engine)
    one, two, *_ = said([1, 2], 4)
    engine.submit(A, Advance(1, 4, (one, two), budget=budget(3)))
    [growth] = growths(engine)
    assert growth.tree == chain(said([1, 2], 5)[2:]), "two nodes were left; the depth allows one more"
    assert len(drafter.grown) == 5


def test_what_does_not_match_is_dropped():
    engine, drafter = opened(nodes=4)
    run(engine)
    other = (said([1, 2], 1)[0] + 1) % VOCAB
    engine.submit(A, Advance(1, 3, (other,), budget=budget(2)))
    assert growths(engine) == [Growth(1, 3, (), chain(said([1, 2, other], 2)), GrowthEnd.BUDGET)]
    assert drafter.grown[-2] == [([1, 2, other], TokenTree())]


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
def test_under_token_and_block_every_base_has_a_chain_of_its_own(method):
    engine, drafter = opened(method=method)
    run(engine)
    engine.submit(A, Advance(1, 3, (7,), budget=budget(3)))
    [first] = growths(engine)
    drafter.grown.clear()
    engine.submit(A, Advance(2, 4, (first.tree.token_ids[0],), budget=budget(3)))
    [second] = growths(engine)
    assert drafter.grown[0][0][1] == TokenTree(), "nothing is left of the old chain"
    assert len(drafter.grown) == 3
    for growth in (first, second):
        assert growth.tree.draft_probs == tuple(SparseDistribution((t,), (1.0,)) for t in growth.tree.token_ids)


@given(st.data())
def test_any_history_of_advances_gives_the_drafters_own_chain_and_answers_each_once(data):
    engine, _ = opened(nodes=data.draw(st.integers(0, 3)))
    text, answers = [1, 2], []
    for number in range(1, data.draw(st.integers(2, 7))):
        for _ in range(data.draw(st.integers(0, 3))):
            answers += [growth for _, growth in engine.step()]
        committed = said(text, data.draw(st.integers(0, 2))) + data.draw(st.lists(st.integers(0, 9), max_size=1))
        text += committed
        allowed = data.draw(st.integers(0, 3))
        engine.submit(A, Advance(number, len(text), tuple(committed), budget=budget(allowed)))
        if data.draw(st.booleans()):
            answers += growths(engine)
            last = answers[-1]
            assert (last.advance, last.base, last.end) == (number, len(text), GrowthEnd.BUDGET)
            assert list(last.tree.token_ids) == said(text, len(last.tree))
            assert len(last.tree) >= allowed
    answers += growths(engine)
    assert [growth.advance for growth in answers] == list(range(len(answers)))
    assert all(growth.end in (GrowthEnd.BUDGET, GrowthEnd.SUPERSEDED) for growth in answers)
    assert answers[-1].end is GrowthEnd.BUDGET


# --- superseding --------------------------------------------------------------------------------------------


def test_a_newer_advance_ends_the_older_between_steps():
    engine, drafter = opened()
    run(engine)
    engine.submit(A, Advance(1, 3, (7,), budget=budget(9)))
    engine.step()
    engine.submit(A, Advance(2, 4, (8,), budget=budget(1)))
    superseded, answer = growths(engine)
    assert superseded == Growth(1, 3, (), TokenTree(), GrowthEnd.SUPERSEDED)
    assert answer == Growth(2, 4, (), chain(said([1, 2, 7, 8], 1)), GrowthEnd.BUDGET)
    assert len(drafter.grown) == 2


def test_several_advances_before_a_step_are_merged_and_each_answered():
    engine, drafter = opened()
    engine.submit(A, Advance(1, 3, (7,), budget=budget(9)))
    engine.submit(A, Advance(2, 3, (), budget=budget(9)))
    engine.submit(A, Advance(3, 5, (8, 9), budget=budget(2)))
    results = growths(engine)
    assert [(growth.advance, growth.end) for growth in results] == [
        (0, GrowthEnd.SUPERSEDED),
        (1, GrowthEnd.SUPERSEDED),
        (2, GrowthEnd.SUPERSEDED),
        (3, GrowthEnd.BUDGET),
    ]
    assert results[-1].tree == chain(said([1, 2, 7, 8, 9], 2))
    assert all(ids == [1, 2, 7, 8, 9] for each in drafter.grown for ids, _ in each)


# --- out of step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("advance", "words"),
    [
        (Advance(0, 3, (7,)), "advance 1 was expected, not 0"),
        (Advance(2, 3, (7,)), "advance 1 was expected, not 2"),
        (Advance(1, 2, (7,)), "base 3 was expected, not 2"),
        (Advance(1, 4, (7,)), "base 3 was expected, not 4"),
        (Advance(1, 3, ()), "base 2 was expected, not 3"),
    ],
)
def test_an_advance_out_of_step_is_told_what_was_expected_and_changes_nothing(advance, words):
    engine, _ = opened()
    with pytest.raises(OutOfStep, match=words):
        engine.submit(A, advance)
    engine.submit(A, Advance(1, 3, (7,), budget=budget(1)))
    assert growths(engine)[-1].tree == chain(said([1, 2, 7], 1))


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
def test_under_token_and_block_an_open_may_not_grow(method):
    engine, drafter = opened()
    with pytest.raises(InvalidArgument) as caught:
        opened(nodes=1, key=B, engine=engine, method=method)
    assert caught.value.violations[0][0] == "budget.max_nodes"
    assert len(drafter.live) == 1
    opened(nodes=1, key=B, engine=engine, method=method, sampling=SamplingParams(0.0))


def test_growing_ahead_is_refused_by_name():
    engine, drafter = opened()
    with pytest.raises(InvalidArgument) as caught:
        engine.submit(A, Advance(1, 3, (7,), budget=Budget(1, 1, 1)))
    assert caught.value.violations[0][0] == "budget.max_ahead"
    with pytest.raises(InvalidArgument):
        engine.open(B, DraftOpen(SequenceSpec((1,), 1), Budget(1, 1, 1)))
    assert len(drafter.live) == 1


def test_advances_of_ended_sequences_are_dropped_silently_and_closes_are_idempotent():
    engine, drafter = opened(nodes=3)
    engine.step()
    engine.close(A)
    engine.close(A)
    engine.close(B)
    engine.submit(A, Advance(1, 3, (7,), budget=budget(1)))
    assert drafter.live == []
    assert engine.idle
    assert list(engine.step()) == []


# --- the end of the context ---------------------------------------------------------------------------------


def test_the_context_ends_the_growth_and_no_row_is_fed_beyond_it():
    engine, drafter = opened([1] * (CONTEXT - 3))
    run(engine)
    engine.submit(A, Advance(1, CONTEXT - 2, (7,), budget=budget(20)))
    [growth] = growths(engine)
    assert growth.end is GrowthEnd.CONTEXT
    # Positions base .. CONTEXT: the last is predicted by the row at CONTEXT - 1.
    assert len(growth.tree) == 3
    assert max(len(ids) + len(tree) for each in drafter.grown for ids, tree in each) == CONTEXT


@pytest.mark.parametrize("length", [CONTEXT + 1, CONTEXT + 9])
def test_a_text_beyond_the_context_has_no_draft_but_is_no_error(length):
    engine, drafter = opened([1] * length, nodes=4)
    assert growths(engine) == [Growth(0, length, (), TokenTree(), GrowthEnd.CONTEXT)]
    engine.submit(A, Advance(1, length + 1, (7,), budget=budget(4)))
    assert growths(engine) == [Growth(1, length + 1, (), TokenTree(), GrowthEnd.CONTEXT)]
    assert drafter.grown == []


# --- failures and draining ----------------------------------------------------------------------------------


def test_an_error_ends_its_sequence_alone():
    engine, drafter = opened()
    opened([5, 6], key=B, engine=engine)
    run(engine)
    drafter.grow_with = lambda s: Overloaded("memory") if s.ids[0] == 1 else drafter.one(s)
    engine.submit(A, Advance(1, 3, (7,), budget=budget(2)))
    engine.submit(B, Advance(1, 3, (8,), budget=budget(2)))
    results = dict(run(engine))
    assert isinstance(results[A], Overloaded)
    assert results[B].tree == chain(said([5, 6, 8], 2))
    assert [memory["ids"] for memory in drafter.live] == [(5, 6)]


def test_an_error_while_a_prompt_is_taken_in_ends_the_sequence():
    engine, drafter = opened()
    drafter.learn_error = Overloaded("memory")
    results = [result for _, result in run(engine)]
    assert [type(result) for result in results] == [Growth, Overloaded]
    assert drafter.live == []


def test_a_pass_that_raises_names_whom_it_was_for_and_loses_no_answer():
    engine, drafter = opened()
    opened([5, 6], key=B, engine=engine)
    run(engine)
    drafter.fail = RuntimeError("out of memory")
    engine.submit(A, Advance(1, 3, (7,), budget=budget(2)))
    engine.submit(B, Advance(1, 3, (8,), budget=budget(0)))
    answered = [(key, growth.advance) for key, growth in engine.step()]
    assert answered == [(B, 1)], "what needs no pass is handed out before one can fail"
    with pytest.raises(RuntimeError):
        engine.step()
    assert list(engine.working_on()) == [A]
    engine.close(A)
    drafter.fail = None
    engine.submit(B, Advance(2, 4, (9,), budget=budget(1)))
    assert growths(engine)[-1].tree == chain(said([5, 6, 8, 9], 1))


def test_draining_refuses_opens_answers_what_is_unanswered_and_ends_the_rest():
    engine, drafter = opened()
    run(engine)
    engine.submit(A, Advance(1, 3, (7,), budget=budget(2)))
    engine.drain()
    with pytest.raises(Draining):
        opened(key=B, engine=engine)
    results = [result for _, result in run(engine)]
    assert [type(result) for result in results] == [Growth, Draining]
    assert results[0].tree == chain(said([1, 2, 7], 2))
    assert drafter.live == []
    assert engine.load.live_sequences == 0
