"""Which sequences are admitted while memory lasts, and which give way when it does not."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from specdec.core.errors import Overloaded, Preempted
from specdec.core.rounds import Round, TargetOpen, Verdict
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.server.step_loop import Key
from target_service.engine import MAX_AUTONOMOUS, TargetEngine
from testing.table_model import Table, TableVerifier

TABLE = Table()


def engine_of(num_slots: int) -> TargetEngine:
    return TargetEngine(TableVerifier(TABLE, num_slots))


def open_(engine: TargetEngine, number: int, *, prompt: int = 10, output: int = 0, **options: float) -> Key:
    """A sequence with so many ids; the smaller the number the older its request, by far."""
    key = Key(1, number)
    ids = tuple(range(prompt + output))
    engine.open(key, TargetOpen(SequenceSpec(ids, prompt), age_s=1e6 - 1e3 * number, **options))  # type: ignore[arg-type]
    return key


def step(engine: TargetEngine) -> dict[Key, object]:
    return dict(engine.step())


def test_there_must_be_room_for_everyone_to_grow_by_32_tokens():
    engine = engine_of(3 * (10 + 32))
    for number in range(3):
        open_(engine, number)
    with pytest.raises(Overloaded):
        open_(engine, 3)


@pytest.mark.parametrize(
    ("first", "num_slots", "second", "let_in"),
    [
        (dict(output=200), 10 + 200 + 100 + 10 + 32, dict(prompt=10), True),
        (dict(output=200), 10 + 200 + 100 + 10 + 32, dict(prompt=11), False),
        (dict(), 10 + 32 + 10 + 200 + 100, dict(output=200), True),
        (dict(), 10 + 32 + 10 + 200 + 100, dict(output=202), False),
    ],
)
def test_a_sequence_with_a_long_output_must_have_room_for_half_as_much_again(first, num_slots, second, let_in):
    engine = engine_of(num_slots)
    open_(engine, 0, **first)
    with nullcontext() if let_in else pytest.raises(Overloaded):
        open_(engine, 1, **second)


def test_a_sequence_that_is_alone_is_always_let_in():
    open_(engine_of(100), 0, output=80)


def crowd(preemptions: list[int]) -> tuple[TargetEngine, list[Key]]:
    """Sequences that have filled the memory: none of them finds room for another row."""
    engine = engine_of((10 + 32) * len(preemptions))
    keys = [open_(engine, number, num_preemptions=count) for number, count in enumerate(preemptions)]
    step(engine)
    for key in keys:
        engine.submit(key, Round(1, 11, num_autonomous=MAX_AUTONOMOUS))
    for _ in range(32):
        assert all(isinstance(result, Verdict) for result in step(engine).values())
    return engine, keys


@pytest.mark.parametrize(
    ("preemptions", "victim"),
    [
        ([0, 0, 0], 2),  # the youngest
        ([0, 0, 1], 1),  # it gave way before; the next
        ([0, 2, 1], 2),
        ([0, 1, 1], 2),
        ([0, 5, 6], 1),  # never the oldest
        ([0], 0),  # but for itself
    ],
)
def test_the_one_preempted_least_often_gives_way_then_the_youngest_and_never_the_oldest(preemptions, victim):
    engine, keys = crowd(preemptions)
    [(key, error)] = step(engine).items()
    assert key == keys[victim]
    assert isinstance(error, Preempted)


def test_one_gives_way_at_a_time_however_many_starve():
    engine, _ = crowd([0, 0, 0])
    results = step(engine)
    assert [type(result) for result in results.values()] == [Preempted]
    assert engine.load.live_sequences == 2


@pytest.mark.parametrize("room", [1, 3])
def test_a_tree_gives_way_to_every_text(room):
    """Also to texts of younger requests."""
    engine = engine_of(3 * (10 + 32))
    keys = [open_(engine, number) for number in range(3)]
    first = step(engine)
    left = 3 * (10 + 32) - 30
    right = [TABLE.next_token(SequenceSpec(tuple(range(10)), 10), [8, 9, first[keys[0]].next_token], 11)]
    tree = TokenTree.chain([*right, *[0] * (left - room - 1)])
    for key in keys:
        engine.submit(key, Round(1, 11, tree if key == keys[0] else EMPTY_TREE))
    verdicts = step(engine)
    assert [type(result) for result in verdicts.values()] == [Verdict] * 3
    assert len(verdicts[keys[0]].accepted) == (room == 3), "with room for its rows and those of the others"


@pytest.mark.parametrize("num_nodes", [0, 4, 256])
def test_a_crowd_that_needs_twice_the_memory_ends_with_few_replays(num_nodes):
    """32 requests of 256 + 200 ids in 4,096 slots. Those outside try again at every tenth pass, the oldest first."""
    engine = engine_of(4096)
    output = dict.fromkeys(range(32), 0)
    preempted = dict.fromkeys(range(32), 0)
    live: dict[Key, int] = {}
    stream = 0
    for num_passes in range(3000):
        waiting = sorted(set(output) - set(live.values())) if num_passes % 10 == 0 else []
        for number in waiting:
            key = Key(stream := stream + 1, number)
            spec = SequenceSpec(tuple(range(256 + output[number])), 256)
            try:
                engine.open(key, TargetOpen(spec, age_s=1e6 - number, num_preemptions=preempted[number]))
            except Overloaded:
                continue
            live[key] = number
        for key, result in engine.step():
            number = live[key]
            if isinstance(result, Verdict):
                output[number] += 1 + len(result.accepted)
                if output[number] < 200:
                    tree = TokenTree.chain(range(num_nodes))
                    engine.submit(key, Round(result.round + 1, 256 + output[number], tree))
                    continue
                engine.close(key)
                del output[number]
            else:
                assert isinstance(result, Preempted)
                preempted[number] += 1
            del live[key]
        if not output:
            break
    assert not output, f"{len(output)} requests never ended"
    assert max(preempted.values()) <= 2
    assert sum(preempted.values()) <= 16
