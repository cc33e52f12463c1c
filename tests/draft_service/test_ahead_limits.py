"""How far a tree grows ahead: to the end of the budget, the context and the memory, and where not at all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.errors import Draining, InvalidArgument
from specdec.core.limits import MAX_TREE_ROWS
from specdec.core.rounds import Advance, Budget, Growth, GrowthEnd
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import TokenTree
from specdec.passes.outputs import RowOutputs
from specdec.passes.rows import Segment
from specdec.server.step_loop import Key
from tests.draft_service.engines import (
    SAMPLINGS,
    A,
    B,
    check_proposed,
    opened,
    ranked,
    rest,
    runner,
    sequence_of,
    together,
)
from tests.models.table_runner import TableRunner


def test_it_never_grows_deeper_than_it_may_nor_beyond_the_context():
    engine = opened(SamplingParams(0.0))
    engine.submit(A, Advance(1, 3, budget=Budget(2, 4, 50)))
    tree = together(rest(engine))
    assert max(tree.depths) == 3
    limit = runner().info.context_length
    ids = tuple(i % 8 for i in range(limit - 4))
    short = opened(SamplingParams(0.0), ids)
    short.submit(A, Advance(1, limit - 4, budget=Budget(2, 50, 50)))
    tree = together(rest(short))
    assert limit - 4 + max(tree.depths) <= limit


@pytest.mark.parametrize("num_nodes", [0, 1, 4])
@pytest.mark.parametrize("distance", range(-1, 5))
def test_no_row_is_fed_beyond_the_context(distance: int, num_nodes: int) -> None:
    """A model with learned positions has none there."""

    class Recording(TableRunner):
        last = -1

        def forward(self, segments: Sequence[Segment]) -> list[RowOutputs]:
            self.last = max(self.last, *(max(segment.positions) for segment in segments))
            return super().forward(segments)

    table = Recording(seed=3, context_length=40)
    ids = tuple(i % 8 for i in range(40 - distance))
    engine = opened(SamplingParams(0.0), ids, table)
    engine.submit(A, Advance(1, len(ids), budget=Budget(num_nodes, 50, 50)))
    grown = rest(engine)
    assert grown[-1].end in (GrowthEnd.BUDGET, GrowthEnd.CONTEXT)
    # What was asked for stays in the tree, and the next advance may grow below it.
    engine.submit(A, Advance(2, len(ids), budget=Budget(0, 50, 50)))
    below = together(rest(engine), together(grown))
    assert table.last <= 39
    if distance > num_nodes:
        assert len(ids) + max(below.depths) == 39, "as deep as a row could still be fed"


def test_without_memory_for_branches_what_was_asked_for_still_comes():
    engine = opened(SamplingParams(0.0), tuple(range(8)) * 3, runner(num_slots=32))
    engine.submit(A, Advance(1, 24, budget=Budget(3, 12, 60)))
    growths = rest(engine)
    assert len(growths[0].tree) == 3
    assert growths[-1].end is GrowthEnd.UNLIKELY
    engine.submit(A, Advance(2, 25, (5,), budget=Budget(3, 3)))
    assert [len(growth.tree) for growth in rest(engine)] == [3]


def test_a_tree_gives_way_to_a_requested_node_and_grows_again() -> None:
    sampling = SamplingParams(0.0)
    engine = opened(sampling, table=runner(num_slots=40))
    engine.submit(A, Advance(1, 3, budget=Budget(2, 9, 30)))
    grown = together(rest(engine))
    assert len(grown) == 32
    cache = sequence_of(engine).state.cache
    assert len(cache.tree) > 8
    text = tuple(range(8)) * 3
    engine.open(B, DraftOpen(SequenceSpec(text, len(text), sampling, 7), Budget(4, 4)))
    assert [len(growth.tree) for growth in rest(engine)] == [4]
    assert len(cache.tree) == 0
    engine.close(B)
    engine.submit(A, Advance(2, 4, grown.token_ids[:1], budget=Budget(2, 9, 30)))
    tree = together(rest(engine), grown.descend(grown.token_ids[:1]))
    check_proposed(sampling, [1, 2, 3, grown.token_ids[0]], tree)
    assert len(cache.tree) > 8


def test_a_request_for_more_than_there_can_be_gets_as_much_as_there_can_be() -> None:
    """And soon: the numbers of the contract go up to 2**32 - 1, and none of them is work in itself."""
    unlimited = 2**32 - 1
    engine = DraftEngine(LanguageModelDrafter(runner()))
    engine.open(A, DraftOpen(SequenceSpec((1, 2, 3), 3, SamplingParams(0.0)), Budget(2, unlimited, unlimited, 8)))
    known = together(rest(engine))
    assert len(known) == 2 + 256, "their siblings are among what grew ahead"
    engine.submit(A, Advance(1, 4, (6,), budget=Budget(0, unlimited, unlimited)))
    growths = rest(engine)
    assert growths[-1].end is GrowthEnd.BUDGET
    assert 256 <= len(together(growths, known.descend([6]))) <= 2 + 2 * 256
    engine.submit(A, Advance(2, 4, budget=Budget(unlimited, unlimited, unlimited, 8)))
    assert rest(engine, 600)[-1].end is GrowthEnd.CONTEXT


def test_a_pass_has_a_limit_however_many_nodes_were_never_fed() -> None:
    """Trees in flight that are not the draft's own, or that had given way; what is proposed is the same."""

    class Recording(TableRunner):
        max_rows = 0

        def forward(self, segments: Sequence[Segment]) -> list[RowOutputs]:
            self.max_rows = max(self.max_rows, sum(len(segment.token_ids) for segment in segments))
            return super().forward(segments)

    table = Recording(seed=3, num_slots=1 << 15)
    engine = DraftEngine(LanguageModelDrafter(table))
    spec = SequenceSpec((1, 2, 3), 3, SamplingParams(0.0), 7)
    chain = TokenTree.chain([number % 8 for number in range(200)])
    keys = [Key(1, number) for number in range(20)]
    for key in keys:
        engine.open(key, DraftOpen(spec, Budget()))
        engine.submit(key, Advance(1, 3, (), chain, Budget(203, 300, 4)))
    rest(engine, 600)
    assert 500 < table.max_rows <= MAX_TREE_ROWS + len(keys)
    trees = [sequence_of(engine, key).tree for key in keys]
    assert [len(tree) for tree in trees] == [207] * len(keys)
    for tree in trees[:2]:
        for node in range(200, 207):
            above = list(tree.path_ids(node))
            assert above[-1] in ranked(spec.sampling, [1, 2, 3, *above[:-1]])


def test_a_chain_without_runners_up_gets_them_when_they_are_asked_for() -> None:
    sampling = SamplingParams(0.0)
    engine = opened(sampling)
    engine.submit(A, Advance(1, 3, budget=Budget(3, 3)))
    chain = together(rest(engine))
    engine.submit(A, Advance(2, 3, (), chain, Budget(0, 3, 20)))
    tree = together(rest(engine), chain)
    assert len(tree) > 10
    check_proposed(sampling, [1, 2, 3], tree)


@pytest.mark.parametrize("method", [Method.TOKEN, Method.BLOCK])
def test_a_chain_that_is_verified_against_its_distribution_has_neither_more_ahead_nor_siblings(method):
    for budget, field in ((Budget(2, 9, 1), "max_ahead"), (Budget(4, 4, max_siblings=1), "max_siblings")):
        engine = opened(SamplingParams(1.0), method=method)
        with pytest.raises(InvalidArgument) as caught:
            engine.submit(A, Advance(1, 3, budget=budget))
        assert caught.value.violations[0][0] == f"budget.{field}"


def test_a_tree_does_not_grow_for_ever_where_nothing_is_committed() -> None:
    engine = opened(SamplingParams(0.0))
    for number in range(1, 12):
        token_ids = tuple(range(8)) * 8
        chain = TokenTree((number % 8, *token_ids), tuple(range(-1, len(token_ids))))
        engine.submit(A, Advance(number, 3, (), chain, Budget(0, 300, max_ahead=60)))
        rest(engine)
    assert len(sequence_of(engine).tree) <= 3 * 256


def test_nothing_grows_ahead_for_a_stream_that_is_held():
    engine = opened(SAMPLINGS[0])
    engine.pause(A.stream, True)
    engine.submit(A, Advance(1, 4, (1,), budget=Budget(2, 100, 40)))
    growths = rest(engine)
    assert [len(growth.tree) for growth in growths] == [2], "what was asked for"
    engine.pause(A.stream, False)
    assert rest(engine)[-1].end is not None
    engine.pause(A.stream, True)
    engine.submit(A, Advance(2, 4, budget=Budget(2, 100, 40)))
    rest(engine)
    engine.drain()
    assert isinstance(rest(engine)[-1], Draining), "a drain waits for no held stream"


def test_a_drain_does_not_wait_for_what_grows_ahead():
    """Every verdict brings an advance before what was granted ahead is used up, so that it would never end."""
    engine = opened(SAMPLINGS[0])
    engine.drain()
    engine.submit(A, Advance(1, 4, (1,), budget=Budget(2, 100, 250)))
    results: list[object] = []
    for _ in range(4):
        results += [result for _, result in engine.step()]
    reported = [result for result in results if isinstance(result, Growth)]
    assert sum(len(growth.tree) for growth in reported) >= 2, "what was asked for is told before"
    assert isinstance(results[-1], Draining)
    assert engine.load.live_sequences == 0
