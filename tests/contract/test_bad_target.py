"""Every row of the status table, provoked over gRPC at the target service; it serves as before afterwards."""

from __future__ import annotations

import asyncio
import struct

import pytest

from specdec.core.errors import ContextExceeded, Overloaded, Preempted, SpecdecError
from specdec.server import chunked_opens
from specdec.v1 import common_pb2
from target_service.language_model import LmVerifier
from testing.misbehaving import Misbehaving
from testing.raw import (
    BLOCK,
    COUPLED,
    TOKEN,
    round_,
    target,
    target_open,
    tree,
)
from testing.table_model import Table, TableVerifier
from tests.contract.bad import INF, NAN, assert_out_of_step, assert_violation, runner

DRAFTED = [([1, 2], [1.0, 0.5]), ([2], [1.0])]  # distributions of the chain 1, 2
BAD_TREES: list[tuple[str, int, common_pb2.TokenTree]] = [
    ("tree", COUPLED, tree([1, 2], [-1])),
    ("tree", COUPLED, tree([], [-1])),
    ("tree", COUPLED, tree([1, 2], [-1, 1])),
    ("tree", COUPLED, tree([1, 2], [0, -1])),
    ("tree", COUPLED, tree([1, 2], [-1, -2])),
    ("tree", COUPLED, tree([1, 2, 3], [-1, 2, 0])),
    ("tree", COUPLED, tree([1, 1], [-1, -1])),
    ("tree", COUPLED, tree([1, 2, 2], [-1, 0, 0])),
    ("tree", COUPLED, tree([1, 8])),
    ("tree", COUPLED, tree([2**32 - 1])),
    ("tree.draft_probs", COUPLED, tree([1, 2], probs=DRAFTED)),
    ("tree.draft_probs", TOKEN, tree([1, 2], [-1, -1], DRAFTED)),
    ("tree", TOKEN, tree([1, 2], probs=DRAFTED[:1])),
    ("tree", TOKEN, tree([1], probs=DRAFTED)),
    ("tree", TOKEN, tree([], probs=DRAFTED)),
    ("tree", BLOCK, tree([1, 2], [-1, -1])),
    *(
        ("tree.draft_probs[0]", BLOCK, tree([1], probs=[distribution]))
        for distribution in [
            ([1, 2], [NAN, 1.0]),
            ([1, 2], [1.0, NAN]),
            ([1, 2], [INF, 1.0]),
            ([1, 2], [1.0, -0.5]),
            ([1, 2], [0.0, 1.0]),  # the drafted token has no weight
            ([2, 3], [1.0, 0.5]),  # nor is it there at all
            ([1, 1], [1.0, 0.5]),
            ([1, 2], [0.5, 0.25]),
            ([1, 2], [2.0, 1.0]),
            ([1, 2], [0.3, 1.0]),  # no fp16 number
            ([1, 2], [1.0]),
            ([1], []),
            ([], [1.0]),
            ([1, 8], [1.0, 0.5]),
            ([1, 2**32 - 1], [1.0, 0.5]),
        ]
    ),
]


async def test_a_malformed_tree_is_refused_by_field_and_disturbs_no_other() -> None:
    async with target(LmVerifier(runner())) as service:
        stream = service.stream()
        await stream.ask(target_open(1))
        for sequence, (field, method, bad) in enumerate(BAD_TREES, 2):
            await stream.ask(target_open(sequence, method=method))
            await stream.send(rounds=[round_(sequence, 1, 4, bad)])
            await assert_violation(stream, sequence, field)
        assert (await stream.ask(round_(1, 1, 4, tree([1, 2, 3, 4], [-1, 0, -1, 2])))).round == 1
        await stream.send(closes=[1])
        await service.nothing_left(open_streams=1)


async def test_good_trees_are_taken() -> None:
    """The boundary from the other side."""
    good = [
        (COUPLED, tree([1, 2, 1, 1], [-1, -1, 0, 1])),
        (TOKEN, tree([1, 2], probs=DRAFTED)),
        (BLOCK, tree([1, 2], probs=[([1, 7], [2.0**-24, 1.0]), ([], [])])),
        (BLOCK, tree([1, 2], [-1, 0])),
        (TOKEN, tree([7])),
    ]
    async with target(LmVerifier(runner())) as service:
        stream = service.stream()
        for sequence, (method, tree_) in enumerate(good):
            await stream.ask(target_open(sequence, method=method))
            verdict = await stream.ask(round_(sequence, 1, 4, tree_))
            assert not isinstance(verdict, SpecdecError), (tree_, verdict)


async def test_a_chain_that_was_not_drawn_as_it_says_is_not_verified_and_the_sequence_goes_on() -> None:
    untrue, certain = ([1, 2], [2.0**-24, 1.0]), ([], [])
    async with target(LmVerifier(runner())) as service:
        stream = service.stream()
        for sequence, method in enumerate((TOKEN, BLOCK)):
            texts = []
            for number, probs in ((2 * sequence, [certain, untrue]), (2 * sequence + 1, None)):
                await stream.ask(target_open(number, method=method))
                verdict = await stream.ask(round_(number, 1, 4, tree([1, 1], probs=probs) if probs else None))
                assert (list(verdict.accepted), verdict.refused) == ([], probs is not None)
                texts.append(verdict.next_token)
                assert not (await stream.ask(round_(number, 2, 5, tree([1])))).refused
            assert texts[0] == texts[1], "the target's own token"
        await stream.ask(target_open(9, method=TOKEN, temperature=0.0))
        await stream.send(rounds=[round_(9, 1, 4, tree([1, 1], probs=[untrue, untrue]))])
        assert not (await stream.answer(9)).refused, "at temperature 0 nothing is drawn"


async def test_a_sequence_number_is_used_once_in_a_stream() -> None:
    async with target(LmVerifier(runner())) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(5), target_open(7)])
        await asyncio.gather(stream.answer(5), stream.answer(7))
        await stream.send(closes=[5])
        for number in (5, 6):
            await stream.send(opens=[target_open(number)])
            await assert_violation(stream, number, "sequence")
        assert (await stream.ask(round_(7, 1, 4))).round == 1
        other = service.stream()  # another stream has numbers of its own
        assert (await other.ask(target_open(5))).base == 3


async def test_more_than_the_targets_context_is_out_of_range_with_the_limit() -> None:
    async with target(LmVerifier(runner(context_length=16))) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, token_ids=[1] * 16), target_open(2, token_ids=[1] * 15)])
        error = await stream.error(1)
        assert isinstance(error, ContextExceeded)
        assert "16" in str(error)
        assert (await stream.answer(2)).base == 15
        await stream.ask(target_open(3, token_ids=[1] * 12))
        assert (await stream.ask(round_(3, 1, 13, tree([1, 2, 3])))).base == 13  # positions 13, 14, 15
        await stream.ask(target_open(4, token_ids=[1] * 12))
        await stream.send(rounds=[round_(4, 1, 13, tree([1, 2, 3, 4]))])
        assert isinstance(await stream.error(4), ContextExceeded)


async def test_a_sequence_that_finds_no_kv_slots_is_refused_and_its_neighbours_stay() -> None:
    verifier = LmVerifier(runner(num_slots=200, context_length=512))
    async with target(verifier) as service:
        stream = service.stream()
        await stream.ask(target_open(1, token_ids=[1] * 20))
        await stream.ask(target_open(2, token_ids=[2] * 10))
        # Opens leave room for what is there to grow.
        await stream.send(opens=[target_open(3, token_ids=[3] * 120)])
        error = await stream.error(3)
        assert isinstance(error, Overloaded)
        assert error.retry_after_s > 0
        # No room is left for the tree of the older one: nothing of it is verified.
        verdict = await stream.ask(round_(1, 1, 21, tree([n % 6 for n in range(190)])))
        assert (verdict.round, list(verdict.accepted)) == (1, [])
        # None is left for its text: the younger is preempted, its caller replays it.
        for number, base, num_more in ((2, 22, 64), (3, 87, 64), (4, 152, 45)):
            await stream.send(rounds=[round_(1, number, base, num_autonomous=num_more)])
            assert [(await stream.answer(1)).round for _ in range(1 + num_more)] == [number] * (1 + num_more)
        assert isinstance(await stream.answer(2), Preempted)
        # A sequence that could never fit is not asked to come back.
        await stream.send(opens=[target_open(4, token_ids=[1] * 200)])
        assert isinstance(await stream.error(4), ContextExceeded)
        await stream.send(closes=[1])
        await service.nothing_left(open_streams=1)


async def test_a_round_out_of_step_is_aborted_naming_what_was_expected() -> None:
    verifier = Misbehaving(LmVerifier(runner()))
    async with target(verifier) as service:
        stream = service.stream()
        await stream.ask(target_open(100))
        await assert_out_of_step(stream, 101)
        # A round that is answered already; and the open's own verdict is an answer to wait for.
        await stream.ask(target_open(200))
        await stream.ask(round_(200, 1, 4))
        await stream.send(rounds=[round_(200, 1, 4)])
        assert "round 2 was expected" in str(await stream.error(200))
        await stream.send(opens=[target_open(201)], rounds=[round_(201, 1, 4), round_(100, 1, 4)])
        assert "round 0 is unanswered" in str(await stream.error(201))
        assert (await stream.answer(100)).round == 1
        await stream.send(closes=[100, 111])  # 111 was opened beside the unknown one
        await service.nothing_left(open_streams=1)


async def test_a_traceparent_of_nonsense_is_no_reason_to_refuse() -> None:
    async with target(LmVerifier(runner())) as service:
        stream = service.stream()
        for sequence, traceparent in enumerate(["x", "00-0-0-0", "\x00", "00-" + "f" * 32 + "-" + "0" * 16 + "-01"]):
            assert (await stream.ask(target_open(sequence, traceparent=traceparent))).base == 3


def test_the_weights_of_the_bad_trees_are_what_they_say() -> None:
    assert struct.unpack("e", struct.pack("e", 0.3))[0] != struct.unpack("f", struct.pack("f", 0.3))[0]
    assert struct.unpack("e", struct.pack("e", 2.0**-24))[0] == 2.0**-24


async def test_a_target_that_knows_no_transforms_refuses_them() -> None:
    async with target(TableVerifier(Table(vocab_size=8))) as service:
        stream = service.stream()
        sampling = common_pb2.SamplingParams(temperature=1, top_p=1, presence_penalty=0.5)
        await stream.send(opens=[target_open(1, sampling=sampling)])
        await assert_violation(stream, 1, "spec.sampling")
        assert (await stream.ask(target_open(2))).base == 3


async def test_a_target_without_an_adapter_refuses_it() -> None:
    async with target(LmVerifier(runner())) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, adapter="sql")])
        await assert_violation(stream, 1, "adapter")
        assert (await stream.ask(target_open(2))).base == 3


async def test_lists_of_an_open_and_a_round_have_bounds() -> None:
    async with target(LmVerifier(runner())) as service:
        stream = service.stream()
        await stream.ask(target_open(1))
        sampling = common_pb2.SamplingParams(temperature=1, top_p=1, min_tokens=1, end_token_ids=[1] * 1025)
        await stream.send(opens=[target_open(2, sampling=sampling)])
        await assert_violation(stream, 2, "spec.sampling.end_token_ids")
        await stream.send(opens=[target_open(3, stop_token_ids=[1] * 1025)])
        await assert_violation(stream, 3, "stop_token_ids")
        await stream.send(opens=[target_open(4, cache_salt=b"x" * 257)])
        await assert_violation(stream, 4, "spec.cache_salt")
        await stream.ask(target_open(5))
        await stream.send(rounds=[round_(5, 1, 4, tree([1] * 1025))])
        await assert_violation(stream, 5, "tree")
        await stream.send(closes=[1])
        await service.nothing_left(open_streams=1)


async def test_the_ids_of_all_unfinished_opens_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_opens, "MAX_OPEN_IDS", 100)
    async with target(LmVerifier(runner())) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(number, token_ids=[1] * 60, more=True) for number in (1, 2)])
        assert isinstance(await stream.error(2), Overloaded)
        assert (await stream.ask(target_open(1))).base == 63
        await stream.send(closes=[1])
        await service.nothing_left(open_streams=1)


async def test_an_open_that_never_ends_is_refused_and_so_are_too_many_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunked_opens, "MAX_OPEN_IDS", 100)
    monkeypatch.setattr(chunked_opens, "MAX_UNFINISHED_OPENS", 3)
    async with target(LmVerifier(runner())) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, token_ids=[1] * 50, more=True)] * 2)
        await stream.send(opens=[target_open(1, token_ids=[1], more=True)])
        await assert_violation(stream, 1, "spec.token_ids")
        await stream.send(opens=[target_open(number, more=True) for number in (2, 3, 4, 5)])
        assert isinstance(await stream.error(5), Overloaded)
        await stream.send(opens=[target_open(2), target_open(5)])  # the rest of the one, and nothing of the other
        assert (await stream.answer(2)).base == 6
        await assert_violation(stream, 5, "sequence")
        await stream.send(closes=[2, 3, 4])
        await service.nothing_left(open_streams=1)
