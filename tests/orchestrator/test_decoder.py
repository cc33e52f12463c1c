"""The loop: whatever the draft does, the text is the target's and nobody is asked for more than fits."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.control.controller import Fixed
from orchestrator.decoder import decode
from orchestrator.drafting.speculation import Speculation
from orchestrator.sequence import FinishReason
from specdec.core.rounds import Growth, GrowthEnd
from specdec.core.sequence import Method
from specdec.core.tree import EMPTY_TREE, TokenTree
from tests.models.fake_peers import FakeDraft, FakeTarget, alone, new_sequence, next_token


async def run(
    draft: FakeDraft, max_tokens: int = 20, num_draft_tokens: int = 4, target=None, max_ahead: int = 0, **options
):
    sequence, speculation = new_sequence(max_tokens=max_tokens, **options), Speculation(draft, max_ahead)
    target = target or FakeTarget()
    target.next_round = speculation.next_round if max_ahead else None
    loop = decode(sequence, target, speculation, Fixed(num_draft_tokens))
    return sequence, [step async for step in loop], target


def perfect(draft, sequence, budget):
    yield Growth(
        draft.num_advances,
        sequence.base,
        (),
        TokenTree.chain(alone(sequence.ids, budget.max_nodes)[sequence.base :]),
        GrowthEnd.BUDGET,
    )


def wrong(draft, sequence, budget):
    guess = (next_token(sequence.ids) + 1) % 10
    yield Growth(draft.num_advances, sequence.base, (), TokenTree.chain([guess]), GrowthEnd.UNLIKELY)


def nothing(draft, sequence, budget):
    draft.there = False
    return ()


def lost(draft, sequence, budget):
    yield None


@pytest.mark.parametrize("answer", [perfect, wrong, nothing, lost])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5, 20])
async def test_the_text_is_the_targets_whatever_the_draft_proposes(answer, max_tokens):
    sequence, steps, _ = await run(FakeDraft(answer), max_tokens)
    assert list(sequence.ids) == alone([1, 2], max_tokens)
    assert [i for step in steps for i in step.piece.token_ids] == list(sequence.ids[2:])
    assert sequence.finish_reason is FinishReason.LENGTH


async def test_a_perfect_draft_gives_k_plus_one_tokens_a_pass():
    _, steps, _ = await run(FakeDraft(perfect), max_tokens=21)
    assert [len(step.piece.token_ids) for step in steps] == [1, 5, 5, 5, 5]


@pytest.mark.parametrize("answer", [perfect, wrong])
@pytest.mark.parametrize("num_draft_tokens", [0, 1, 4, 64])
@pytest.mark.parametrize("max_tokens", [1, 2, 7, 20])
async def test_the_draft_is_asked_for_at_most_what_remains_less_one(answer, num_draft_tokens, max_tokens):
    remaining = []

    def asked(draft, sequence, budget):
        remaining.append((sequence.remaining, budget))
        return answer(draft, sequence, budget)

    _, _, target = await run(FakeDraft(asked), max_tokens, num_draft_tokens)
    for left, budget in remaining:
        assert 0 < budget.max_nodes <= min(num_draft_tokens, left - 1)
        assert budget.max_depth <= left - 1
        assert budget.max_ahead == 0
    assert all(len(tree) <= num_draft_tokens for tree in target.trees)
    if num_draft_tokens == 0:
        assert not remaining


@pytest.mark.parametrize("max_tokens", [1, 2])
async def test_the_last_token_of_all_needs_no_draft(max_tokens):
    draft = FakeDraft(perfect)
    await run(draft, max_tokens)
    assert draft.num_advances == max_tokens - 1


def test_the_budget_depends_on_the_length_left_alone():
    controller = Fixed(4)
    for committed in range(1, 12):
        texts = [new_sequence(prompt, max_tokens=12) for prompt in ([1, 2], [9, 9, 9])]
        for number, sequence in enumerate(texts):
            rng = random.Random(number)
            sequence.ids.extend(rng.randrange(10) for _ in range(committed))
        numbers = {sum(grant.num_tokens for grant in controller.plan(sequence).grants) for sequence in texts}
        assert numbers == {min(4, 12 - committed - 1)}


async def test_the_controller_sees_every_verdict_and_its_tree_and_is_asked_again_only_while_more_follows():
    seen, asked = [], []

    class Watching(Fixed):
        def observe(self, record):
            seen.append(record)

        def plan(self, sequence):
            asked.append(sequence.finished)
            return super().plan(sequence)

    sequence = new_sequence(max_tokens=9)
    steps = [s async for s in decode(sequence, FakeTarget(), Speculation(FakeDraft(perfect)), Watching(3))]
    assert seen == [step.record for step in steps]
    assert not any(asked)
    assert len(asked) == len(steps)


async def test_a_stop_inside_the_block_ends_the_loop_there():
    text = alone([1, 2], 20)
    stop = text[6]
    first = text.index(stop, 2)
    sequence, steps, _ = await run(FakeDraft(perfect), stop_token_ids=frozenset({stop}))
    assert list(sequence.ids) == text[: first + 1]
    assert [i for step in steps for i in step.piece.token_ids] == text[2:first]
    assert sequence.finish_reason is FinishReason.STOP


def far_sighted(draft, sequence, budget):
    """Grows below what is in flight, and a wrong branch."""
    text = alone(sequence.ids, budget.max_depth)[sequence.base :]
    wrong = TokenTree.chain([(text[0] + 1) % 10, 0]) if text else EMPTY_TREE
    tree = TokenTree.chain(text).merge(wrong)
    draft.pushed = [Growth(draft.num_advances, sequence.base, (), tree, GrowthEnd.BUDGET)] if tree else []
    if budget.max_nodes:
        yield Growth(draft.num_advances, sequence.base, (), tree, GrowthEnd.BUDGET)


@pytest.mark.parametrize("max_tokens", [1, 2, 5, 6, 7, 40, 43])
async def test_a_round_that_is_sent_early_is_the_next_one(max_tokens):
    sequence, steps, target = await run(FakeDraft(far_sighted), max_tokens, target=FakeTarget(), max_ahead=16)
    assert list(sequence.ids) == alone([1, 2], max_tokens)
    if max_tokens >= 40:
        # Not after the open, and none that may come after the end.
        assert target.num_under_way >= len(steps) - 4
        assert max(len(tree) for tree in target.trees) == 4


async def test_a_round_that_is_sent_early_and_lost_costs_no_token():
    class Moving(FakeTarget):
        async def verify(self, sequence, proposal, plan):
            self.replay_next = self.replay_next or self._left is not None
            return await super().verify(sequence, proposal, plan)

    sequence, _, target = await run(FakeDraft(far_sighted), 40, target=Moving(), max_ahead=16)
    assert list(sequence.ids) == alone([1, 2], 40)
    assert target.num_under_way


async def test_a_replay_in_the_middle_costs_a_round_and_no_token():
    class Moving(FakeTarget):
        async def verify(self, sequence, proposal, plan):
            self.replay_next = self.replay_next or len(self.trees) in (2, 3)
            return await super().verify(sequence, proposal, plan)

    sequence, steps, _ = await run(FakeDraft(perfect), target=Moving())
    assert list(sequence.ids) == alone([1, 2], 20)
    opens = [step for step in steps if step.record.number == 0]
    assert len(opens) == 3
    statistics = sequence.statistics
    assert statistics.num_rounds == len(steps)
    verified = [step for step in steps if step.record.num_nodes and step.record.number]
    assert statistics.num_drafts == len(verified)
    assert statistics.num_draft_tokens == sum(step.record.num_nodes for step in verified)
    assert statistics.num_accepted_tokens == sum(len(step.record.accepted) for step in steps)


async def test_the_targets_failure_is_the_loops():
    class Failing(FakeTarget):
        async def verify(self, sequence, proposal, plan):
            raise RuntimeError("gone")

    with pytest.raises(RuntimeError, match="gone"):
        await run(FakeDraft(perfect), target=Failing())


@given(st.data())
async def test_no_behaviour_of_a_draft_changes_the_text(data):
    """Late, early, repeated, missing, malformed in base or path, too long, branching: under coupled sampling."""
    token = st.integers(0, 9)

    def anything(draft, sequence, budget):
        for _ in range(data.draw(st.integers(0, 3))):
            tree = TokenTree.chain(data.draw(st.lists(token, max_size=6)))
            if data.draw(st.booleans()):
                tree = tree.merge(TokenTree.chain(alone(sequence.ids, 3)[sequence.base :]))
            yield Growth(
                data.draw(st.integers(0, draft.num_advances)),
                max(0, sequence.base - data.draw(st.integers(-1, 4))),
                tuple(data.draw(st.lists(token, max_size=2))),
                tree,
                data.draw(st.none() | st.sampled_from(list(GrowthEnd))),
            )
        yield data.draw(
            st.none() | st.just(Growth(draft.num_advances, sequence.base, (), EMPTY_TREE, GrowthEnd.BUDGET))
        )

    class Forgetful(FakeDraft):
        def advance(self, sequence, budget, in_flight, num_there):
            self.pushed = self.script[: data.draw(st.integers(0, 2))]
            self.script.clear()
            return super().advance(sequence, budget, in_flight, num_there)

        def arrived(self):
            return [growth for growth in super().arrived() if growth is not None]

    max_tokens, num_draft_tokens = data.draw(st.integers(1, 12)), data.draw(st.integers(0, 4))
    max_ahead = data.draw(st.sampled_from([0, 8]))
    target = FakeTarget(lambda: data.draw(st.booleans()))
    sequence, steps, _ = await run(Forgetful(anything), max_tokens, num_draft_tokens, target, max_ahead)
    assert list(sequence.ids) == alone([1, 2], len(sequence.ids) - 2)
    assert [i for step in steps for i in step.piece.token_ids] == list(sequence.ids[2:])
    assert sequence.remaining == 0
    assert all(len(tree) <= num_draft_tokens for tree in target.trees)


async def test_under_token_verification_the_target_gets_whole_chains_only():
    lengths = []

    def sometimes_lost(draft, sequence, budget):
        if not sequence.num_committed:
            return  # DraftClient asks for nothing before the first token
        if draft.num_advances % 2:
            yield Growth(draft.num_advances, sequence.base, (), TokenTree.chain([1, 2]), None)
            yield None
        else:
            lengths.append(budget.max_nodes)
            yield from perfect(draft, sequence, budget)

    sequence, _, target = await run(FakeDraft(sometimes_lost), method=Method.TOKEN)
    assert [len(tree) for tree in target.trees if tree] == lengths
    assert len(lengths) > 2
    assert sequence.num_committed == 20
