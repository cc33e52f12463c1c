"""A language model as a drafter: what it proposes below a text, and how rows are shared, wanted and bounded."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from draft_service.drafter import DraftSequence
from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.rounds import Budget
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import TokenTree
from specdec.passes.outputs import RowOutputs
from specdec.passes.rows import Segment
from specdec.server.step_loop import Key
from tests.models.table_runner import TableRunner

LIKELIEST = SamplingParams(0.0)


def test_whatever_was_rolled_back_the_next_token_is_that_of_the_text():
    """Random verdicts: chains kept in part, corrected, and texts that go on without having been fed."""
    runner, random_ = TableRunner(seed=3), random.Random(4)
    drafter = LanguageModelDrafter(runner)
    fresh = LanguageModelDrafter(TableRunner(seed=3))
    spec = SequenceSpec(tuple(random_.randrange(8) for _ in range(39)), 39, SamplingParams(0.0), 0, Method.COUPLED)
    sequence = DraftSequence(spec, list(spec.token_ids), state=drafter.open(spec))
    for _ in range(60):
        for _ in range(random_.randrange(5)):
            sequence.num_wanted = random_.choice([1, 1, 2, 5])
            [nodes] = drafter.grow([sequence])
            assert isinstance(nodes, list)
            assert len(nodes) == sequence.num_wanted
            for node in nodes:
                whole = SequenceSpec((*sequence.ids, *sequence.tree.token_ids), 39, spec.sampling, 0, spec.method)
                alone = DraftSequence(whole, list(whole.token_ids), state=fresh.open(whole))
                [[expected]] = fresh.grow([alone])
                fresh.close(alone.state)
                assert (node.parent, node.token_id) == (len(sequence.tree) - 1, expected.token_id)
                sequence.tree = TokenTree.chain([*sequence.tree.token_ids, node.token_id])
        accepted = sequence.tree.token_ids[: random_.randrange(len(sequence.tree) + 1)]
        sequence.ids += [*accepted, *(random_.randrange(8) for _ in range(random_.choice([1, 1, 1, 20])))]
        sequence.tree = TokenTree()
        if random_.random() < 0.3:
            drafter.learn([sequence])
            assert len(sequence.state.cache.text) >= sequence.base - 1
        assert len(sequence.state.cache.text) <= sequence.base


class CountingRunner(TableRunner):
    num_rows = 0

    def forward(self, segments: Sequence[Segment]) -> list[RowOutputs]:
        self.num_rows += sum(len(segment.token_ids) for segment in segments)
        return super().forward(segments)


@pytest.mark.parametrize("asked", [False, True])
def test_equal_prompts_are_computed_once(asked: bool) -> None:
    """A sequence takes over the chunks of another chunk by chunk, whether a token is asked for or not."""
    runner = CountingRunner(seed=3, num_slots=32_768, block_size=16, context_length=4096)
    drafter = LanguageModelDrafter(runner)
    prompt = tuple(random.Random(5).randrange(8) for _ in range(2000))
    spec = SequenceSpec(prompt, len(prompt), SamplingParams(0.0), 0, Method.COUPLED)
    left = all_ = [DraftSequence(spec, list(prompt), state=drafter.open(spec)) for _ in range(4)]
    while left:
        outcomes = drafter.grow(left) if asked else drafter.learn(left)
        left = [sequence for sequence, outcome in zip(left, outcomes, strict=True) if not outcome]
    num_ids = len(prompt) if asked else len(prompt) - 1
    assert [len(sequence.state.cache.text) for sequence in all_] == [num_ids] * 4
    assert runner.num_rows == num_ids + 3, "all but one take it over, and feed the last id"
    assert runner.num_passes == 5


def grown(
    budgets: Sequence[int], requested: bool = False, sampling: SamplingParams = LIKELIEST
) -> tuple[list[TokenTree], int]:
    """The trees of sequences that ask for so many nodes at once; and the number of passes."""
    runner = TableRunner(seed=3)
    engine = DraftEngine(LanguageModelDrafter(runner))
    engine.request_yield(requested)
    for number, nodes in enumerate(budgets):
        spec = SequenceSpec((1, number % 8, 2), 3, sampling, 0, cache_salt=bytes([number]))
        engine.open(Key(1, number), DraftOpen(spec, Budget(nodes, nodes)))
    trees: dict[Key, TokenTree] = {}
    while not engine.idle:
        trees |= {key: growth.tree for key, growth in engine.step()}
    return [trees[Key(1, number)] for number in range(len(budgets))], runner.num_passes


@pytest.mark.parametrize("sampling", [LIKELIEST, SamplingParams(1.0), SamplingParams(0.7, top_p=0.9)], ids=str)
def test_a_chain_is_grown_in_one_pass_unless_the_model_must_yield(sampling: SamplingParams) -> None:
    trees, num_passes = grown([5, 5, 5], sampling=sampling)
    assert num_passes == 1
    assert [len(tree) for tree in trees] == [5, 5, 5]
    assert grown([5, 5, 5], requested=True, sampling=sampling) == (trees, 5)


def test_chains_of_different_lengths_are_as_long_as_they_are_wanted() -> None:
    trees, num_passes = grown([2, 7, 4])
    assert [len(tree) for tree in trees] == [2, 7, 4]
    assert num_passes == 3, "one each time that a sequence has enough"


def test_with_penalties_no_row_follows_in_a_pass() -> None:
    """Such rows would be drawn without the penalties, fed, and thrown away."""
    runner = TableRunner(seed=3)
    drafter = LanguageModelDrafter(runner)
    sampling = SamplingParams(0.0, presence_penalty=2.0)
    spec = SequenceSpec((1, 2), 2, sampling, 0)
    at_once, one_by_one = (DraftSequence(spec, [1, 2], state=drafter.open(spec)) for _ in range(2))
    at_once.num_wanted = 6
    num_rounds = 0
    while len(at_once.tree) < 6:
        [nodes] = drafter.grow([at_once])
        assert isinstance(nodes, list)
        at_once.tree = at_once.tree.extended(nodes)
        at_once.num_wanted = 6 - len(at_once.tree)
        num_rounds += 1
    for _ in range(6):
        [[node]] = drafter.grow([one_by_one])
        one_by_one.tree = one_by_one.tree.extended([node])
    assert at_once.tree == one_by_one.tree
    assert num_rounds == 6
    assert runner.num_further_passes == 0


def test_what_is_needed_comes_before_what_may_follow() -> None:
    """One wants eight nodes and the other one, in a pool in which the eight have no room beside the one."""
    runner = TableRunner(seed=3, num_slots=12, block_size=4)
    drafter = LanguageModelDrafter(runner)
    sequences = []
    for number, wanted in enumerate((8, 1)):
        spec = SequenceSpec((1, 2, 3), 3, SamplingParams(0.0), 0, cache_salt=bytes([number]))
        sequences.append(DraftSequence(spec, [1, 2, 3], state=drafter.open(spec), num_wanted=wanted))
    assert [len(nodes) for nodes in drafter.grow(sequences) if isinstance(nodes, list)] == [1, 1]
    [nodes] = drafter.grow(sequences[1:])
    assert isinstance(nodes, list)


def test_no_remembered_block_is_given_up_for_rows_that_cannot_follow() -> None:
    runner = TableRunner(seed=3, num_slots=48, block_size=4)
    runner.decodes_further = False
    drafter = LanguageModelDrafter(runner)
    for number in range(4):
        spec = SequenceSpec((1, 2, 3, 4, 5, 6, 7, number), 8, SamplingParams(0.0), 0, cache_salt=bytes([number]))
        sequence = DraftSequence(spec, list(spec.token_ids), state=drafter.open(spec), num_wanted=32)
        drafter.grow([sequence])
        drafter.close(sequence.state)
    assert runner.pool.num_free_blocks == 12
    for number in range(4):
        cache = runner.new_cache(bytes([number]))
        cache.attach([1, 2, 3, 4, 5, 6, 7, number, 1, 2])
        assert len(cache) == 8, "two blocks of each text are remembered"
        cache.release()


def test_a_sequence_that_waits_for_a_twins_prompt_does_not_wait_for_its_draft() -> None:
    """Samples of one prompt: the first computes it, the others take it over in the next pass, and draft together."""
    runner = TableRunner(seed=3, block_size=4)
    drafter = LanguageModelDrafter(runner)
    spec = SequenceSpec(tuple(number % 8 for number in range(40)), 40, SamplingParams(0.0), 0)
    sequences = [DraftSequence(spec, list(spec.token_ids), state=drafter.open(spec), num_wanted=8) for _ in range(4)]
    first, *others = drafter.grow(sequences)
    assert isinstance(first, list)
    assert len(first) == 1
    assert others == [None] * 3
    assert runner.num_passes + runner.num_further_passes == 1


def test_many_sequences_that_ask_for_many_nodes_make_no_larger_pass() -> None:
    runner = TableRunner(seed=3)
    drafter = LanguageModelDrafter(runner)
    sequences = []
    for number in range(16):
        spec = SequenceSpec((1, number % 8, 2), 3, SamplingParams(0.0), 0, cache_salt=bytes([number]))
        sequences.append(DraftSequence(spec, list(spec.token_ids), state=drafter.open(spec), num_wanted=400))
    drafter.grow(sequences)
    assert runner.num_further_passes == 4


def test_a_prompt_is_learned_in_chunks_of_the_limit() -> None:
    runner = TableRunner()
    runner.chunk.rows = 16
    drafter = LanguageModelDrafter(runner)
    spec = SequenceSpec(tuple(position % 8 for position in range(100)), 100, LIKELIEST)
    sequence = DraftSequence(spec, list(spec.token_ids), state=drafter.open(spec))
    learned = [drafter.learn([sequence]) for _ in range(7)]
    assert learned == [*[[False]] * 6, [True]]
