"""The protocol of advances by examples; test_engine_stateful.py has any history, tests/contract the wire."""

from __future__ import annotations

import pytest

from draft_service.budgets import granted
from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.errors import InvalidArgument, Overloaded, PassFailed
from specdec.core.rounds import Advance, Budget, Growth, GrowthEnd
from specdec.core.sequence import Method, Priority, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, Candidate, SparseDistribution, TokenTree
from specdec.server.step_loop import Key
from testing.misbehaving import MODELS_OWN, Misbehaving
from tests.draft_service.engines import (
    CONTEXT,
    TABLE,
    A,
    B,
    open_plain,
    plain,
    plain_drafter,
    proposed,
    rest,
    rest_by_key,
)

chain = TokenTree.chain


def budget(nodes: int) -> Budget:
    return Budget(nodes, nodes)


def test_an_open_without_budget_is_answered_and_its_prompt_taken_in():
    engine, drafter = plain()
    assert rest(engine) == [Growth(0, 2, (), EMPTY_TREE, GrowthEnd.BUDGET)]
    assert drafter.learnt == [[[1, 2]]]
    assert drafter.passes == []


def test_an_open_with_budget_grows_before_the_first_token_is_known():
    engine, _ = plain(nodes=3)
    assert rest(engine) == [Growth(0, 2, (), chain(proposed([1, 2], 3)), GrowthEnd.BUDGET)]


def test_an_advance_without_budget_is_answered_at_once_and_taken_in_when_no_tree_grows():
    engine, drafter = plain()
    open_plain(engine, B)
    rest(engine)
    drafter.learnt.clear()
    engine.submit(A, Advance(1, 4, (7, 0), budget=budget(0)))
    engine.submit(B, Advance(1, 3, (5,), budget=budget(2)))
    assert [key for key, _ in rest_by_key(engine)] == [A, B]
    assert [ids for entries in drafter.passes for ids, _ in entries] == [[1, 2, 5]] * 2
    assert drafter.learnt == [[[1, 2, 7, 0]]]


def test_a_sequence_without_room_in_a_pass_is_in_the_next_one(monkeypatch):
    monkeypatch.setattr("draft_service.engine.MAX_TREE_ROWS", 3)
    engine, drafter = plain(nodes=2)
    keys = [A, *(Key(1, number) for number in range(2, 9))]
    for key in keys[1:]:
        open_plain(engine, key, nodes=2)
    assert sorted(key for key, _ in rest_by_key(engine)) == keys
    assert max(map(len, drafter.passes)) == 3
    assert len(drafter.passes) == 6


@pytest.mark.parametrize(("method", "num_granted"), [(Method.COUPLED, 1024), (Method.BLOCK, 64)])
def test_no_budget_is_larger_than_a_peer_accepts(method, num_granted):
    spec = SequenceSpec((1, 2), 2, SamplingParams(1.0), 0, method)
    asked = Budget(max_nodes=1 << 32 - 1, max_depth=1 << 32 - 1)
    assert granted(spec, asked, TABLE.info("table-draft")).max_nodes == num_granted


def test_a_drafter_that_grows_a_level_of_several_nodes_keeps_to_the_budget():
    engine, drafter = plain()
    rest(engine)

    def level(sequence):
        leaves = [n for n, d in enumerate(sequence.tree.depths) if d == max(sequence.tree.depths)] or [-1]
        return [Candidate(leaf, token) for leaf in leaves for token in (1, 2)]

    drafter.instead = level
    engine.submit(A, Advance(1, 3, (7,), budget=Budget(5, 9)))
    [growth] = rest(engine)
    assert growth.tree == TokenTree((1, 2, 1, 2, 1), (-1, -1, 0, 0, 1))


def test_without_a_likely_token_the_growth_ends():
    engine, drafter = plain()
    rest(engine)
    drafter.instead = lambda sequence: MODELS_OWN if len(sequence.tree) < 2 else []
    engine.submit(A, Advance(1, 3, (7,), budget=budget(5)))
    assert rest(engine) == [Growth(1, 3, (), chain(proposed([1, 2, 7], 2)), GrowthEnd.UNLIKELY)]


def test_all_that_have_budget_share_a_pass():
    engine, drafter = plain()
    open_plain(engine, B, [5, 6])
    rest(engine)
    engine.submit(A, Advance(1, 3, (7,), budget=budget(3)))
    engine.submit(B, Advance(1, 3, (0,), budget=budget(1)))
    assert engine.load.waiting_sequences == 2
    results = dict(rest_by_key(engine))
    assert [len(pass_) for pass_ in drafter.passes] == [2, 1, 1]
    assert results[A].tree == chain(proposed([1, 2, 7], 3))
    assert results[B].tree == chain(proposed([5, 6, 0], 1))
    load = engine.load
    assert (load.live_sequences, load.waiting_sequences) == (2, 0)
    assert load.passes == len(drafter.passes) + len(drafter.learnt)


def test_a_sequence_with_budget_goes_before_one_that_only_takes_in_a_prompt():
    engine, drafter = plain(nodes=2)
    open_plain(engine, B, [5, 6])
    rest(engine)
    assert all(len(pass_) == 1 for pass_ in drafter.passes)
    assert drafter.learnt == [[[5, 6]]]


def test_what_matches_is_kept_and_grown_on_and_the_rest_is_dropped():
    engine, drafter = plain(nodes=4)
    rest(engine)
    one, two, *_ = proposed([1, 2], 4)
    engine.submit(A, Advance(1, 4, (one, two), budget=budget(3)))
    [growth] = rest(engine)
    assert growth.tree == chain(proposed([1, 2], 5)[2:]), "two nodes were left; the depth allows one more"
    assert len(drafter.passes) == 5
    text = [1, 2, one, two, (growth.tree.token_ids[0] + 1) % 8]
    engine.submit(A, Advance(2, 5, (text[-1],), budget=budget(2)))
    assert rest(engine) == [Growth(2, 5, (), chain(proposed(text, 2)), GrowthEnd.BUDGET)]
    assert drafter.passes[-2] == [(text, EMPTY_TREE)]


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
def test_under_token_and_block_every_base_has_a_chain_of_its_own(method):
    engine, drafter = plain(method=method)
    drafter.instead = lambda sequence: [Candidate(len(sequence.tree) - 1, 3, SparseDistribution((3,), (1.0,)))]
    rest(engine)
    for number, token in ((1, 7), (2, 3)):
        del drafter.passes[:]
        engine.submit(A, Advance(number, 2 + number, (token,), budget=budget(3)))
        [growth] = rest(engine)
        assert drafter.passes[0][0][1] == EMPTY_TREE, "nothing is left of an older chain"
        assert growth.tree == chain([3] * 3, [SparseDistribution((3,), (1.0,))] * 3)
    with pytest.raises(InvalidArgument) as caught:
        open_plain(engine, B, nodes=1, method=method)
    assert caught.value.violations[0][0] == "budget.max_nodes"
    assert len(drafter.live) == 1


def test_several_advances_before_a_step_are_merged_and_each_answered():
    engine, drafter = plain()
    engine.submit(A, Advance(1, 3, (7,), budget=budget(9)))
    engine.submit(A, Advance(2, 3, (), budget=budget(9)))
    engine.submit(A, Advance(3, 5, (0, 6), budget=budget(2)))
    results = rest(engine)
    assert [(growth.advance, growth.end) for growth in results] == [
        (0, GrowthEnd.SUPERSEDED),
        (1, GrowthEnd.SUPERSEDED),
        (2, GrowthEnd.SUPERSEDED),
        (3, GrowthEnd.BUDGET),
    ]
    assert results[-1].tree == chain(proposed([1, 2, 7, 0, 6], 2))
    assert all(ids == [1, 2, 7, 0, 6] for pass_ in drafter.passes for ids, _ in pass_)


def test_growing_ahead_is_refused_by_name():
    engine, drafter = plain()
    with pytest.raises(InvalidArgument) as caught:
        engine.submit(A, Advance(1, 3, (7,), budget=Budget(1, 1, 1)))
    assert caught.value.violations[0][0] == "budget.max_ahead"
    with pytest.raises(InvalidArgument):
        engine.open(B, DraftOpen(SequenceSpec((1,), 1), Budget(1, 1, 1)))
    assert len(drafter.live) == 1


def test_the_context_ends_the_growth_and_no_row_is_fed_beyond_it():
    engine, drafter = plain([1] * (CONTEXT - 3))
    rest(engine)
    engine.submit(A, Advance(1, CONTEXT - 2, (7,), budget=budget(20)))
    [growth] = rest(engine)
    assert growth.end is GrowthEnd.CONTEXT
    # Positions base .. CONTEXT: the last is predicted by the row at CONTEXT - 1.
    assert len(growth.tree) == 3
    assert max(len(ids) + len(tree) for pass_ in drafter.passes for ids, tree in pass_) == CONTEXT


def test_a_text_beyond_the_context_has_no_draft_but_is_no_error():
    engine, drafter = plain([1] * (CONTEXT + 1), nodes=4)
    engine.submit(A, Advance(1, CONTEXT + 2, (7,), budget=budget(4)))
    assert [growth.end for growth in rest(engine)] == [GrowthEnd.SUPERSEDED, GrowthEnd.CONTEXT]
    assert drafter.passes == []


def test_an_error_ends_its_sequence_alone():
    engine, drafter = plain()
    open_plain(engine, B, [5, 6])
    rest(engine)
    drafter.script([1, 2], Overloaded("memory"))
    engine.submit(A, Advance(1, 3, (7,), budget=budget(2)))
    engine.submit(B, Advance(1, 3, (0,), budget=budget(2)))
    results = dict(rest_by_key(engine))
    assert isinstance(results[A], Overloaded)
    assert results[B].tree == chain(proposed([5, 6, 0], 2))
    assert drafter.live == [(5, 6)]


def test_an_error_while_a_prompt_is_taken_in_ends_the_sequence(monkeypatch):
    engine, drafter = plain()
    monkeypatch.setattr(drafter, "learn", lambda sequences: [Overloaded("memory")] * len(sequences))
    assert [type(result) for result in rest(engine)] == [Growth, Overloaded]
    assert drafter.live == []


def test_a_pass_that_raises_names_its_sequences_and_loses_no_answer():
    engine, drafter = plain()
    open_plain(engine, B, [5, 6])
    rest(engine)
    drafter.error = RuntimeError("out of memory")
    engine.submit(A, Advance(1, 3, (7,), budget=budget(2)))
    engine.submit(B, Advance(1, 3, (0,), budget=budget(0)))
    answered = [(key, growth.advance) for key, growth in engine.step()]
    assert answered == [(B, 1)], "what needs no pass is handed out before one can fail"
    with pytest.raises(PassFailed):
        engine.step()
    assert list(engine.working_on()) == [A]


# --- priorities ---------------------------------------------------------------------------------------------


def prioritized(**priorities: Priority) -> tuple[DraftEngine, Misbehaving, list[float]]:
    """Sequences by the names of their keys, their prompts taken in; and the time, which is the last of a list."""
    drafter, times = plain_drafter(), [0.0]
    engine = DraftEngine(drafter, clock=lambda: times[-1])
    for name, priority in priorities.items():
        open_plain(engine, {"a": A, "b": B}[name], priority=priority)
    rest(engine)
    del drafter.passes[:]
    return engine, drafter, times


def test_a_batch_request_is_drafted_in_passes_that_no_other_needs():
    engine, _, _ = prioritized(a=Priority.BATCH, b=Priority.STANDARD)
    engine.submit(A, Advance(1, 3, (7,), budget=budget(1)))
    engine.submit(B, Advance(1, 3, (7,), budget=budget(3)))
    assert [key for key, _ in rest_by_key(engine)] == [B, A], "although it asks for less"


def test_batch_requests_alone_share_passes():
    engine, drafter, _ = prioritized(a=Priority.BATCH, b=Priority.BATCH)
    for key in (A, B):
        engine.submit(key, Advance(1, 3, (7,), budget=budget(2)))
    rest(engine)
    assert [len(entries) for entries in drafter.passes] == [2, 2]


def test_a_batch_request_that_has_waited_joins_the_passes_of_others():
    engine, drafter, times = prioritized(a=Priority.BATCH, b=Priority.INTERACTIVE)
    engine.submit(A, Advance(1, 3, (7,), budget=budget(1)))
    engine.submit(B, Advance(1, 3, (7,), budget=budget(3)))
    assert list(engine.step()) == []
    times.append(0.2)
    assert [key for key, _ in engine.step()] == [A]
    assert [len(entries) for entries in drafter.passes] == [1, 2]
