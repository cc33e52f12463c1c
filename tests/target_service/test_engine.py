"""The protocol of a round by examples; test_engine_stateful.py has any history, tests/contract the wire."""

from __future__ import annotations

import time

import pytest

from specdec.core.errors import InvalidArgument, OutOfStep, Preempted
from specdec.core.rounds import Round
from specdec.core.sequence import Method, SamplingParams
from specdec.core.tree import ROOT, TokenTree
from specdec.server.step_loop import Key
from tests.target_service.contract_model import CONTEXT, VOCAB
from tests.target_service.engines import A, B, chain, opened, run, said

TEXT = said([1, 2], CONTEXT)


def wrong(token: int) -> int:
    return (token + 1) % VOCAB


# --- verdicts -----------------------------------------------------------------------------------------------


def test_an_open_counts_as_round_0_and_gives_the_first_token():
    engine, verifier = opened(first=False)
    [(key, verdict)] = engine.step()
    assert (key, verdict.round, verdict.base, verdict.accepted, verdict.next_token) == (A, 0, 2, (), TEXT[0])
    assert (verdict.timings.rows, verdict.timings.sequences) == (2, 1)
    assert engine.idle
    assert list(engine.step()) == []
    assert len(verifier.passes) == 1, "an idle engine makes no pass"


def test_a_round_verifies_its_tree_from_the_last_token():
    engine, verifier = opened()
    tree = TokenTree((wrong(TEXT[1]), TEXT[1], TEXT[2]), (ROOT, ROOT, 1))
    engine.submit(A, Round(1, 3, tree))
    [(_, verdict)] = engine.step()
    assert (verdict.accepted, verdict.next_token) == ((1, 2), TEXT[3])
    assert verifier.passes[-1] == [([1, 2, TEXT[0]], tree)]
    assert engine.texts[A] == [1, 2, *TEXT[:4]]


def test_all_that_wait_share_a_pass_and_each_gets_its_own():
    engine, verifier = opened(first=False)
    opened([5, 6, 7], key=B, engine=engine, first=False)
    assert engine.load.waiting_sequences == 2
    results = dict(engine.step())
    assert len(verifier.passes) == 1
    assert [results[A].next_token, results[B].next_token] == [TEXT[0], *said([5, 6, 7], 1)]
    engine.submit(B, Round(1, 4))
    assert [key for key, _ in engine.step()] == [B]
    load = engine.load
    assert (load.live_sequences, load.waiting_sequences, load.passes) == (2, 0, 2)
    assert (load.kv_slots_used, load.kv_slots_total) == verifier.cache_use() == (6, 1 << 20)


def test_a_sequence_without_room_in_a_pass_is_in_the_next_one(monkeypatch):
    """Without a bound a pass of many samples with many draft tokens each took more memory than was planned."""
    monkeypatch.setattr("target_service.engine.MAX_TREE_ROWS", 8)
    engine, verifier = opened()
    keys = [A, *(Key(1, number) for number in range(2, 8))]
    for key in keys[1:]:
        opened(key=key, engine=engine)
    for number in (1, 2, 3):
        del verifier.passes[:]
        for key in keys:
            engine.submit(key, Round(number, len(engine.texts[key]), chain([9, 9, 9][: int(key.sequence) % 4])))
        answered = [key for _ in range(4) for key, _ in engine.step()]
        assert sorted(answered) == keys, "each has a turn before any has two"
        assert engine.idle
        assert all(sum(1 + len(tree) for _, tree in entries) <= 8 for entries in verifier.passes)
    engine.submit(A, Round(4, len(engine.texts[A]), chain([9] * 12)))
    assert [key for key, _ in engine.step()] == [A], "a larger tree has a pass of its own"


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
def test_a_chain_that_is_verified_whole_has_at_most_64_nodes(method):
    engine, _ = opened(method=method, sampling=SamplingParams(1.0))
    with pytest.raises(InvalidArgument, match="of at most 64 nodes"):
        engine.submit(A, Round(1, 3, chain([9] * 65)))


def test_the_wait_of_a_round_begins_when_it_arrives_even_during_a_pass():
    engine, _ = opened()
    arrived = time.perf_counter()
    time.sleep(0.02)
    engine.submit(A, Round(1, 3), arrived=arrived)
    [(_, verdict)] = engine.step()
    assert verdict.timings.queue_us >= 20_000
    engine.submit(A, Round(2, 4), arrived=arrived - 1000)  # the verdict came after it
    [(_, verdict)] = engine.step()
    assert verdict.timings.queue_us < 900_000_000


@pytest.mark.parametrize(("num_drafted", "length"), [(0, CONTEXT), (2, CONTEXT + 1)])
def test_no_row_is_ever_fed_beyond_the_context(num_drafted, length):
    engine, verifier = opened([1] * (CONTEXT - 3))
    tokens = said([1] * (CONTEXT - 3), 1 + num_drafted)
    engine.submit(A, Round(1, CONTEXT - 2, chain(tokens[1:]), num_autonomous=50))
    run(engine)
    assert len(engine.texts[A]) == length
    for ids, tree in (entry for entries in verifier.passes for entry in entries):
        assert len(ids) + max(tree.depths, default=-1) < CONTEXT


@pytest.mark.parametrize("starved", [(1, 2), (5, 6)])
def test_the_request_that_arrived_last_is_preempted_whichever_is_starved(starved):
    engine, verifier = opened(age_s=1.0)
    opened([5, 6], key=B, engine=engine, age_s=60.0)  # a replay: it came later and is older
    verifier.script(starved, Preempted("memory"))
    for key in (A, B):
        engine.submit(key, Round(1, 3))
    results = dict(engine.step())
    assert isinstance(results[A], Preempted)
    if starved == (5, 6):  # the older one is in the next pass again
        assert B not in results
        results = dict(engine.step())
    assert results[B].next_token == said([5, 6], 2)[1]
    assert verifier.live == [(5, 6)]
    assert engine.load.live_sequences == 1


def test_the_oldest_gets_memory_first():
    engine, verifier = opened(first=False, age_s=1.0)
    opened([5, 6], key=B, engine=engine, first=False, age_s=2.0)
    engine.step()
    assert [ids for ids, _ in verifier.passes[-1]] == [[5, 6], [1, 2]]


# --- a round that is sent before the verdict on the one before it --------------------------------------------


def forked() -> TokenTree:
    """From base 3: the first token as it will be and as it will not, and three more below each."""
    tokens = (TEXT[1], wrong(TEXT[1]), TEXT[2], 0, TEXT[3], 0, TEXT[4], 0)
    return TokenTree(tokens, (ROOT, ROOT, 0, 1, 2, 3, 4, 5))


@pytest.mark.parametrize(("max_nodes", "accepted"), [(0, (4, 6)), (1, (4,)), (2, (4, 6)), (9, (4, 6))])
def test_an_early_round_verifies_the_first_nodes_of_what_is_left_of_its_tree(max_nodes, accepted):
    engine, verifier = opened()
    engine.submit(A, Round(1, 3, chain([TEXT[1]])))  # commits two tokens
    engine.submit(A, Round(2, 3, forked(), max_nodes=max_nodes))
    first, second = run(engine)
    assert (first.round, first.base, first.accepted, first.dropped_round) == (1, 3, (0,), 0)
    assert verifier.passes[-1][0][1] == chain(TEXT[3 : 3 + len(accepted)])
    assert (second.round, second.base, second.accepted) == (2, 5, accepted), "nodes of the tree as it was sent"
    assert engine.texts[A] == [1, 2, *TEXT[: 4 + len(accepted)]]


@pytest.mark.parametrize("tree", [chain([wrong(TEXT[1]), 0, 0]), chain([TEXT[1]])])
def test_an_early_round_without_a_node_left_is_dropped_and_its_number_is_free(tree):
    engine, verifier = opened()
    engine.submit(A, Round(1, 3))
    engine.submit(A, Round(2, 3, tree))
    [verdict] = run(engine)
    assert (verdict.round, verdict.dropped_round) == (1, 2)
    assert len(verifier.passes) == 2, "nothing was computed for it"
    engine.submit(A, Round(2, 4, chain([TEXT[2]])))
    assert [(verdict.round, verdict.accepted) for verdict in run(engine)] == [(2, (0,))]


def test_an_early_round_after_a_stop_token_is_dropped():
    engine, _ = opened(stop_token_ids=frozenset({TEXT[1]}))
    engine.submit(A, Round(1, 3))
    engine.submit(A, Round(2, 3, chain(TEXT[1:4])))
    assert [verdict.dropped_round for verdict in run(engine)] == [2]


def test_a_round_that_arrives_after_the_verdict_stands_without_a_node_left():
    """Its sender does not know yet that it is too late, and is told of no drop."""
    engine, _ = opened()
    engine.submit(A, Round(1, 3))
    engine.step()
    engine.submit(A, Round(2, 3, chain([wrong(TEXT[1]), 0])))
    assert [(verdict.round, verdict.base, verdict.accepted) for verdict in run(engine)] == [(2, 4, ())]


def test_an_early_round_may_arrive_during_the_pass_before_it():
    engine, _ = opened()
    engine.submit(A, Round(1, 3))
    [(_, first)] = engine.step(lambda: engine.submit(A, Round(2, 3, chain([wrong(TEXT[1]), 0]))))
    assert (first.round, first.dropped_round) == (1, 2)
    engine.submit(A, Round(2, 4))
    [(_, second)] = engine.step(lambda: engine.submit(A, Round(3, 4, chain(TEXT[2:5]))))
    assert (second.round, second.dropped_round) == (2, 0)
    assert [(verdict.round, verdict.accepted) for verdict in run(engine)] == [(3, (1, 2))]


def test_a_sequence_that_is_closed_during_its_pass_is_told_nothing():
    engine, verifier = opened()
    engine.submit(A, Round(1, 3))
    assert engine.step(lambda: engine.close(A)) == []
    assert engine.idle
    assert not verifier.live


# --- autonomous decoding ------------------------------------------------------------------------------------


def test_a_round_during_an_autonomous_pass_belongs_to_the_time_after_it():
    engine, _ = opened()
    opened(key=B, engine=engine)
    for key in (A, B):
        engine.submit(key, Round(1, 3, num_autonomous=9))
    engine.step()

    def poll() -> None:
        engine.submit(A, Round(2, 4, chain(TEXT[2:5])))
        engine.submit(B, Round(7, 4))

    results = engine.step(poll)
    assert [(key, result.round, result.base) for key, result in results[:2]] == [(A, 1, 4), (B, 1, 4)]
    [(key, error)] = results[2:]
    assert key == B
    assert isinstance(error, OutOfStep)
    assert [(verdict.round, verdict.base, verdict.accepted) for verdict in run(engine)] == [(2, 5, (1, 2))]
    assert engine.texts[A] == [1, 2, *TEXT[:6]]


def test_autonomous_decoding_ends_whatever_is_allowed(monkeypatch):
    """A peer that allowed 2^32 tokens and read none of them once filled the memory."""
    monkeypatch.setattr("target_service.engine.MAX_AUTONOMOUS", 6)
    engine, _ = opened()
    engine.submit(A, Round(1, 3, num_autonomous=2**32 - 1))
    assert [verdict.num_autonomous_left for verdict in run(engine)] == [6, 5, 4, 3, 2, 1, 0]


def test_autonomous_decoding_ends_at_a_stop_token_among_the_accepted():
    engine, _ = opened(stop_token_ids=frozenset({TEXT[1]}))
    engine.submit(A, Round(1, 3, chain(TEXT[1:3]), num_autonomous=9))
    assert len(run(engine)) == 1


def test_a_held_stream_gets_no_autonomous_verdict():
    engine, _ = opened()
    other = Key(2, 1)
    opened(key=other, engine=engine)
    for key in (A, other):
        engine.submit(key, Round(1, 3, num_autonomous=4))
    engine.pause(A.stream, True)
    assert sorted(key for key, _ in engine.step()) == [A, other], "what was asked for"
    assert [key for _ in range(4) for key, _ in engine.step()] == [other] * 4
    assert engine.idle
    engine.pause(A.stream, False)
    assert [verdict.num_autonomous_left for verdict in run(engine)] == [3, 2, 1, 0]
    assert engine.texts[A] == [1, 2, *TEXT[:6]]


def test_verdicts_while_a_round_is_on_its_way_count_towards_its_allowance():
    engine, _ = opened()
    engine.submit(A, Round(1, 3, num_autonomous=9))
    for _ in range(4):
        engine.step()
    engine.submit(A, Round(2, 5, num_autonomous=6))  # sent when two had come
    assert [(verdict.round, verdict.base, verdict.num_autonomous_left) for verdict in run(engine)] == [
        (2, 7 + number, 4 - number) for number in range(5)
    ]
    engine.submit(A, Round(3, 5, num_autonomous=6))
    assert [verdict.num_autonomous_left for verdict in run(engine)] == [0]
