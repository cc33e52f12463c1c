"""A text that grows, as a language model has it: whatever was drafted below it, and whoever else computes it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from draft_service.drafter import DraftSequence
from draft_service.drafters.language_model import LanguageModelDrafter
from specdec.model_runner import RowOutputs
from specdec.packed_rows import Segment
from specdec.sequence import Method, SamplingParams, SequenceSpec
from specdec.tree import TokenTree
from tests.table_model import TableRunner


def test_whatever_was_rolled_back_the_next_token_is_that_of_the_text():
    """Random verdicts: chains kept in part, corrected, and texts that go on without having been fed."""
    runner, random_ = TableRunner(seed=3), random.Random(4)
    drafter = LanguageModelDrafter(runner)
    fresh = LanguageModelDrafter(TableRunner(seed=3))
    spec = SequenceSpec(tuple(random_.randrange(8) for _ in range(39)), 39, SamplingParams(0.0), 0, Method.COUPLED)
    sequence = DraftSequence(spec, list(spec.token_ids), memory=drafter.open(spec))
    for _ in range(60):
        for _ in range(random_.randrange(5)):
            [[node]] = drafter.grow([sequence])
            whole = SequenceSpec((*sequence.ids, *sequence.tree.token_ids), 39, spec.sampling, 0, spec.method)
            alone = DraftSequence(whole, list(whole.token_ids), memory=fresh.open(whole))
            [[expected]] = fresh.grow([alone])
            fresh.close(alone.memory)
            assert node.token_id == expected.token_id
            sequence.tree = TokenTree.chain([*sequence.tree.token_ids, node.token_id])
        accepted = sequence.tree.token_ids[: random_.randrange(len(sequence.tree) + 1)]
        sequence.ids += [*accepted, *(random_.randrange(8) for _ in range(random_.choice([1, 1, 1, 20])))]
        sequence.tree = TokenTree()
        if random_.random() < 0.3:
            drafter.learn([sequence])
            assert len(sequence.memory.cache.text) >= sequence.base - 1
        assert len(sequence.memory.cache.text) <= sequence.base


class CountingRunner(TableRunner):
    num_rows = 0

    def forward(self, segments: Sequence[Segment]) -> list[RowOutputs]:
        self.num_rows += sum(len(segment.token_ids) for segment in segments)
        return super().forward(segments)


@pytest.mark.parametrize("asked", [False, True])
def test_equal_prompts_are_computed_once(asked: bool) -> None:
    """Who waits for another's chunks takes them over, chunk by chunk, whether a token is asked for or not."""
    runner = CountingRunner(seed=3, num_slots=32_768, block_size=16, context_length=4096)
    drafter = LanguageModelDrafter(runner)
    prompt = tuple(random.Random(5).randrange(8) for _ in range(2000))
    spec = SequenceSpec(prompt, len(prompt), SamplingParams(0.0), 0, Method.COUPLED)
    left = all_ = [DraftSequence(spec, list(prompt), memory=drafter.open(spec)) for _ in range(4)]
    while left:
        outcomes = drafter.grow(left) if asked else drafter.learn(left)
        left = [sequence for sequence, outcome in zip(left, outcomes, strict=True) if not outcome]
    num_ids = len(prompt) if asked else len(prompt) - 1
    assert [len(sequence.memory.cache.text) for sequence in all_] == [num_ids] * 4
    assert runner.num_rows == num_ids + 3, "all but one take it over, and feed the last id"
    assert runner.num_passes == 5
