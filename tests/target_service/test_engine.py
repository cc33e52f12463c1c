"""The protocol of a round, with a verifier that is plain Python: no gRPC, no torch."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.errors import ContextExceeded, Draining, InvalidArgument, OutOfStep, Overloaded, Preempted
from specdec.core.rounds import Round, Verdict
from specdec.core.sequence import Method, SamplingParams
from specdec.core.tree import TokenTree
from specdec.server.step_loop import Key
from target_service.engine import TargetEngine
from tests.models.fake_target import CONTEXT, VOCAB, A, B, FakeVerifier, chain, law, opened, run, said, text_of

# --- verdicts -----------------------------------------------------------------------------------------------


def test_an_open_counts_as_round_0_and_gives_the_first_token():
    engine, verifier = opened(first=False)
    assert not engine.idle
    [(key, verdict)] = engine.step()
    assert key == A
    assert (verdict.round, verdict.base, verdict.accepted, verdict.next_token) == (0, 2, (), law([1, 2]))
    assert (verdict.timings.pass_us, verdict.timings.rows, verdict.timings.sequences) == (5, 7, 1)
    assert engine.idle
    assert list(engine.step()) == []
    assert len(verifier.jobs) == 1, "an idle engine makes no pass"


def test_a_round_verifies_its_tree_from_the_last_token():
    engine, verifier = opened()
    first, second, third = said([1, 2], 3)
    tree = TokenTree(((second + 1) % VOCAB, second, third), (-1, -1, 1))
    engine.submit(A, Round(1, 3, tree))
    [(_, verdict)] = engine.step()
    assert verdict.accepted == (1, 2)
    assert verdict.next_token == law([1, 2, first, second, third])
    assert verifier.jobs[-1][0].ids == [1, 2, first]
    assert verifier.jobs[-1][0].tree == tree
    assert text_of(engine) == [1, 2, *said([1, 2], 4)]


@given(st.data())
def test_whatever_trees_come_the_text_is_the_targets(data):
    engine, _ = opened()
    for number in range(1, data.draw(st.integers(2, 6))):
        text = list(text_of(engine))
        right = said(text, data.draw(st.integers(0, 4)))
        tree = chain(right).merge(chain(data.draw(st.lists(st.integers(0, VOCAB - 1), max_size=4))))
        base = data.draw(st.integers(2, len(text)))
        engine.submit(A, Round(number, base, chain(text[base:]).merge(tree.under(text[base:]))))
        [(_, verdict)] = engine.step()
        assert verdict.base == len(text)
        assert len(verdict.accepted) >= len(right)
        assert text_of(engine) == [1, 2, *said([1, 2], len(text_of(engine)) - 2)]


def test_predictions_come_only_where_asked_for():
    for asked in (True, False):
        engine, _ = opened(return_predictions=asked)
        engine.submit(A, Round(1, 3, chain([4])))
        [(_, verdict)] = engine.step()
        assert verdict.predictions == ((law([1, 2, law([1, 2])]), 4) if asked else ())


def test_all_that_wait_share_a_pass_and_each_gets_its_own():
    engine, verifier = opened(first=False)
    opened([5, 6, 7], key=B, engine=engine, first=False)
    assert engine.load.waiting_sequences == 2
    results = dict(engine.step())
    assert len(verifier.jobs) == 1
    assert (results[A].next_token, results[B].next_token) == (law([1, 2]), law([5, 6, 7]))
    engine.submit(B, Round(1, 4))
    assert [key for key, _ in engine.step()] == [B]
    load = engine.load
    assert (load.live_sequences, load.waiting_sequences, load.passes) == (2, 0, 2)
    assert (load.kv_slots_used, load.kv_slots_total) == (300, 5000)


def test_who_finds_no_room_in_a_pass_is_in_the_next_one(monkeypatch):
    """Without a bound a pass of many samples with many draft tokens each took more memory than was reckoned with."""
    monkeypatch.setattr("target_service.engine.MAX_TREE_ROWS", 8)
    engine, verifier = opened()
    keys = [A, *(Key(1, number) for number in range(2, 8))]
    for key in keys[1:]:
        opened(key=key, engine=engine)
    for number in (1, 2, 3):
        del verifier.jobs[:]
        bases = {key: len(text_of(engine, key)) for key in keys}
        for key in keys:
            engine.submit(key, Round(number, bases[key], chain([9, 9, 9][: int(key.sequence) % 4])))
        answered = [key for _ in range(4) for key, _ in engine.step()]
        assert sorted(answered) == keys, "everybody has a turn before anybody has two"
        assert engine.idle
        assert all(sum(1 + len(job.tree) for job in jobs) <= 8 for jobs in verifier.jobs)
    engine.submit(A, Round(4, len(text_of(engine)), chain([9] * 12)))
    assert [key for key, _ in engine.step()] == [A], "who is larger than that is alone"


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
def test_a_chain_that_is_verified_whole_has_an_end(method):
    engine, _ = opened(method=method, sampling=SamplingParams(1.0))
    with pytest.raises(InvalidArgument, match="of at most 64 nodes"):
        engine.submit(A, Round(1, 3, chain([9] * 65)))


def test_a_round_waits_from_when_it_came_and_not_from_when_the_model_took_it():
    """Else who came during a pass would seem to have been away for all of it."""
    engine, _ = opened()
    arrived = time.perf_counter()
    time.sleep(0.02)
    engine.submit(A, Round(1, 3), arrived=arrived)
    [(_, verdict)] = engine.step()
    assert verdict.timings.queue_us >= 20_000
    engine.submit(A, Round(2, 4), arrived=arrived - 1000)  # the verdict came after it
    [(_, verdict)] = engine.step()
    assert verdict.timings.queue_us < 900_000_000


# --- older bases --------------------------------------------------------------------------------------------


def test_a_tree_with_an_older_base_is_walked_along_what_was_committed_since():
    engine, verifier = opened()
    one, two, three, four, five = said([1, 2], 5)
    engine.submit(A, Round(1, 3, run_on=1))
    engine.step()
    engine.step()
    # The text is 1 2 | one two three; the tree hangs from the first token and has a wrong branch.
    tree = TokenTree((two, (two + 1) % VOCAB, three, four, five), (-1, -1, 0, 2, 3))
    engine.submit(A, Round(2, 3, tree))
    [(_, verdict)] = engine.step()
    assert verifier.jobs[-1][0].ids == [1, 2, one, two, three]
    assert verifier.jobs[-1][0].tree == chain([four, five])
    assert (verdict.base, verdict.accepted) == (5, (3, 4)), "indices are those of the tree as it was sent"
    assert verdict.next_token == law([1, 2, one, two, three, four, five])


def test_a_tree_with_an_older_base_that_went_another_way_verifies_nothing():
    engine, verifier = opened()
    engine.submit(A, Round(1, 3, run_on=1))
    engine.step()
    engine.step()
    engine.submit(A, Round(2, 3, chain([(said([1, 2], 2)[1] + 1) % VOCAB, 5])))
    [(_, verdict)] = engine.step()
    assert not verifier.jobs[-1][0].tree
    assert (verdict.round, verdict.base, verdict.accepted) == (2, 5, ())


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
def test_under_token_and_block_a_tree_must_name_the_current_base(method):
    engine, _ = opened(method=method)
    engine.submit(A, Round(1, 3, run_on=1))
    engine.step()
    engine.step()
    with pytest.raises(OutOfStep, match="base 5 was expected, not 4"):
        engine.submit(A, Round(2, 4, chain([1])))
    engine, _ = opened(method=method)
    engine.submit(A, Round(1, 3, run_on=1))
    engine.step()
    engine.step()
    engine.submit(A, Round(2, 3))  # an empty one may be late
    assert [verdict.base for _, verdict in engine.step()] == [5]


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
def test_under_token_and_block_a_tree_that_branches_is_refused(method):
    tree = TokenTree((1, 2), (-1, -1))
    engine, _ = opened(method=method)
    with pytest.raises(InvalidArgument) as caught:
        engine.submit(A, Round(1, 3, tree))
    assert caught.value.violations[0][0] == "tree"
    greedy, _ = opened(method=method, sampling=SamplingParams(0.0))
    greedy.submit(A, Round(1, 3, tree))


# --- out of step --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("round_", "words"),
    [
        (Round(0, 3), "round 1 was expected, not 0"),
        (Round(2, 3), "round 1 was expected, not 2"),
        (Round(1, 4), "base 3 was expected, not 4"),
        (Round(1, 1), "base 3 was expected, not 1"),
    ],
)
def test_a_round_out_of_step_is_told_what_was_expected(round_, words):
    engine, _ = opened()
    with pytest.raises(OutOfStep, match=words):
        engine.submit(A, round_)


def test_one_round_of_a_sequence_at_a_time():
    engine, _ = opened()
    engine.submit(A, Round(1, 3))
    with pytest.raises(OutOfStep, match="round 1 is unanswered"):
        engine.submit(A, Round(2, 3))
    engine, _ = opened(first=False)
    with pytest.raises(OutOfStep, match="round 0 is unanswered"):
        engine.submit(A, Round(1, 2))


def test_rounds_of_ended_sequences_are_dropped_silently_and_closes_are_idempotent():
    engine, verifier = opened()
    engine.close(A)
    engine.close(A)
    engine.close(B)
    assert verifier.live == []
    engine.submit(A, Round(1, 3))
    assert engine.idle


# --- the end of the context ---------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [CONTEXT, CONTEXT + 1])
def test_an_open_that_leaves_no_room_is_refused_and_keeps_nothing(length):
    engine, verifier = opened()
    with pytest.raises(ContextExceeded, match=str(CONTEXT)):
        opened([1] * length, key=B, engine=engine)
    assert len(verifier.live) == 1
    opened([1] * (CONTEXT - 1), key=B, engine=engine)


def test_no_row_is_ever_fed_beyond_the_context():
    engine, verifier = opened([1] * (CONTEXT - 3))
    base = CONTEXT - 2
    with pytest.raises(ContextExceeded):
        engine.submit(A, Round(1, base, chain([1, 2, 3])))
    engine, verifier = opened([1] * (CONTEXT - 3))
    tokens = said([1] * (CONTEXT - 3), 3)
    engine.submit(A, Round(1, base, chain(tokens[1:]), run_on=50))
    run(engine)
    for job in (job for jobs in verifier.jobs for job in jobs):
        assert len(job.ids) + max(job.tree.depths, default=-1) < CONTEXT
    with pytest.raises(ContextExceeded):
        engine.submit(A, Round(2, len(text_of(engine))))


# --- failures -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("starved", [0, 1])
def test_the_request_that_arrived_last_is_preempted_whoever_is_starved(starved):
    engine, verifier = opened(age_s=1.0)
    opened([5, 6], key=B, engine=engine, age_s=60.0)  # a replay: it came later and is older
    verifier.live[starved]["outcomes"].append(Preempted("memory"))
    engine.submit(A, Round(1, 3))
    engine.submit(B, Round(1, 3))
    results = dict(engine.step())
    assert isinstance(results[A], Preempted)
    if starved:  # the older one comes again in the next pass
        assert B not in results
        results = dict(engine.step())
    assert results[B].next_token == law(text_of(engine, B)[:-1])
    assert [memory["spec"].token_ids for memory in verifier.live] == [(5, 6)]
    assert engine.load.live_sequences == 1


def test_the_oldest_gets_memory_first():
    engine, verifier = opened(first=False, age_s=1.0)
    opened([5, 6], key=B, engine=engine, first=False, age_s=2.0)
    engine.step()
    assert [tuple(job.ids) for job in verifier.jobs[-1]] == [(5, 6), (1, 2)]


def test_a_full_service_refuses_opens():
    verifier = FakeVerifier()
    engine = TargetEngine(verifier, max_sequences=1)
    opened(engine=engine)
    with pytest.raises(Overloaded):
        opened(key=B, engine=engine)


def test_a_prefill_that_is_not_done_waits_for_the_next_pass():
    engine, verifier = opened(first=False)
    verifier.live[0]["outcomes"] += [None, None]
    assert list(engine.step()) == []
    assert not engine.idle
    assert list(engine.step()) == []
    [(_, verdict)] = engine.step()
    assert (verdict.round, verdict.base) == (0, 2)
    assert engine.load.passes == 3


def test_a_pass_that_raises_names_whom_it_was_for_and_changes_nobody():
    engine, verifier = opened()
    opened([5, 6], key=B, engine=engine)
    engine.submit(B, Round(1, 3))
    verifier.fail = RuntimeError("out of memory")
    with pytest.raises(RuntimeError):
        engine.step()
    assert list(engine.working_on()) == [B]
    engine.close(B)
    verifier.fail = None
    engine.submit(A, Round(1, 3))
    assert [key for key, _ in engine.step()] == [A]


# --- draining -----------------------------------------------------------------------------------------------


def test_draining_refuses_opens_and_ends_what_waits_for_nothing():
    engine, verifier = opened()
    engine.drain()
    assert not engine.idle
    [(key, error)] = engine.step()
    assert key == A
    assert isinstance(error, Draining)
    assert verifier.live == []
    assert engine.idle
    with pytest.raises(Draining):
        opened(key=B, engine=engine)
    assert verifier.live == []


def test_draining_answers_what_is_unanswered_first():
    engine, verifier = opened()
    engine.submit(A, Round(1, 3, run_on=100))
    engine.drain()
    results = [result for _, result in engine.step()]
    assert [type(result) for result in results] == [Verdict, Draining]
    assert verifier.live == []


def test_draining_lets_a_long_prefill_end():
    engine, verifier = opened(first=False)
    verifier.live[0]["outcomes"].append(None)
    engine.drain()
    assert list(engine.step()) == []
    assert [type(result) for _, result in engine.step()] == [Verdict, Draining]
