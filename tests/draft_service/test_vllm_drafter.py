"""A draft on vLLM proposes what one on our own engine does, whatever was committed meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from draft_service.__main__ import DraftSettings
from draft_service.drafter import Branch, Drafter, DraftSequence
from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.drafters.vllm_drafter import VllmDrafter
from draft_service.drafters.vllm_sampler import DraftSampler
from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.errors import Overloaded, SpecdecError
from specdec.core.rounds import Budget, GrowthEnd
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import TokenTree
from specdec.server.step_loop import Key
from tests.draft_service.engines import rest
from tests.models.fake_vllm import FakeVllm
from tests.models.table_runner import TableRunner

SPECS = [
    SequenceSpec((1, 2, 3), 3, SamplingParams(temperature=0.0), seed=1),
    SequenceSpec((3, 2, 4, 5), 4, SamplingParams(repetition_penalty=1.3), seed=2),
    SequenceSpec((1,) * 9, 9, SamplingParams(top_k=5), seed=3, method=Method.TOKEN),
    SequenceSpec((2, 2), 2, SamplingParams(), seed=4, method=Method.BLOCK),
]


def on_vllm(prompt_rows: int = 512, context_length: int = 512) -> tuple[VllmDrafter, FakeVllm]:
    table = TableRunner(vocab_size=12, seed=4, context_length=context_length)
    fake = FakeVllm(table, DraftSampler(torch.device("cpu")), prompt_rows)
    return VllmDrafter(fake, table.info), fake  # type: ignore[arg-type]


def opened(drafter: Drafter, specs: Sequence[SequenceSpec] = SPECS) -> list[DraftSequence]:
    return [DraftSequence(spec, list(spec.token_ids), state=drafter.open(spec)) for spec in specs]


def grow(drafter: Drafter, sequences: Sequence[DraftSequence]) -> None:
    """A token for each, in as many passes as that takes."""
    todo = list(sequences)
    while todo:
        grown = drafter.grow(todo)
        for sequence, nodes in zip(todo, grown, strict=True):
            if nodes is not None:
                [node] = nodes
                drawn = () if sequence.spec.keyed_by_token else (*sequence.tree.draft_probs, node.draft_probs)
                sequence.tree = TokenTree.chain((*sequence.tree.token_ids, node.token_id), drawn)
        todo = [sequence for sequence, nodes in zip(todo, grown, strict=True) if nodes is None]


def proposals(drafter: Drafter) -> list[TokenTree]:
    """Over rounds of which some are learnt only, or commit more than a pass takes in."""
    rng, outcomes = random.Random(5), []
    sequences = opened(drafter)
    for _ in range(30):
        chosen = [sequence for sequence in sequences if rng.random() < 0.7]
        if rng.random() < 0.3:
            todo = chosen
            while todo:
                todo = [waiting for waiting, done in zip(todo, drafter.learn(todo), strict=True) if done is not True]
        for sequence in chosen:
            # Sometimes a tree is in flight already, and some of it is wrong.
            flying = rng.choices(range(12), k=rng.choice([0, 0, 2])) if sequence.spec.keyed_by_token else []
            sequence.tree = TokenTree.chain(flying)
        for _ in range(rng.randrange(4)):
            grow(drafter, chosen)
        outcomes += [sequence.tree for sequence in chosen]
        for sequence in chosen:
            if sequence.spec.keyed_by_token and rng.random() < 0.3:  # the same place again, with more guesses
                sequence.num_candidates, sequence.tree = 1 + sequence.num_candidates % 3, TokenTree()
                grow(drafter, [sequence])
                outcomes.append(sequence.tree)
        for sequence in chosen:
            accepted = sequence.tree.token_ids[: rng.randrange(4)]
            sequence.ids += [*accepted, *(rng.randrange(12) for _ in range(rng.choice([1, 1, 1, 11])))]
            sequence.tree = TokenTree()
    return outcomes


def test_a_draft_on_vllm_proposes_what_one_on_our_own_engine_does() -> None:
    drafter, _ = on_vllm()
    assert proposals(drafter) == proposals(LanguageModelDrafter(TableRunner(vocab_size=12, seed=4)))  # type: ignore[arg-type]


@pytest.mark.parametrize("spec", SPECS, ids=[spec.method.value + str(spec.seed) for spec in SPECS])
def test_a_chain_is_drafted_in_one_step_as_long_as_it_is_wanted(spec: SequenceSpec) -> None:
    """The same as in steps of one token, also over rounds of which none, some or all of it was accepted."""
    drafter, fake = on_vllm()
    [whole] = opened(drafter, [spec])
    other, _ = on_vllm()
    [steps] = opened(other, [spec])
    for number, num_accepted in enumerate((0, 2, 4, 1), 1):
        whole.num_wanted = fake.max_chain
        [grown] = drafter.grow([whole])
        assert grown is not None
        assert not isinstance(grown, SpecdecError)
        assert fake.num_passes == number
        for _ in range(fake.max_chain):
            grow(other, [steps])
        assert [node.token_id for node in grown] == list(steps.tree.token_ids)
        if not spec.keyed_by_token:
            assert [node.draft_probs for node in grown] == list(steps.tree.draft_probs)
        drafted = (*steps.tree.token_ids, 0)
        committed = [*drafted[:num_accepted], (drafted[num_accepted] + 1) % 12]
        for sequence in (whole, steps):
            sequence.ids += committed
            sequence.tree = TokenTree()


def test_a_step_is_short_while_others_wait() -> None:
    drafter, fake = on_vllm()
    [sequence] = opened(drafter, SPECS[:1])
    sequence.num_wanted = 5
    drafter.request_yield(True)
    [grown] = drafter.grow([sequence])
    assert grown is not None
    assert len(grown) == 1  # type: ignore[arg-type]
    assert fake.num_drafts == [0]


def test_what_was_learnt_or_proposed_costs_no_second_pass() -> None:
    drafter, fake = on_vllm()
    [sequence] = opened(drafter, SPECS[:1])
    assert drafter.learn([sequence]) == [True]
    first, again = drafter.grow([sequence]), drafter.grow([sequence])
    assert first == again
    assert fake.num_passes == 1


def test_a_draft_without_memory_says_so_and_a_closed_one_leaves_nothing() -> None:
    drafter, fake = on_vllm()
    [sequence] = opened(drafter, SPECS[:1])
    fake.short_of_memory = True
    [outcome] = drafter.grow([sequence])
    assert isinstance(outcome, Overloaded)
    drafter.close(sequence.state)
    assert not fake.texts


def test_it_grows_ahead_of_the_verdict_along_the_likeliest_path() -> None:
    drafter, fake = on_vllm()
    engine, key = DraftEngine(drafter), Key(1, 1)
    engine.open(key, DraftOpen(SPECS[1], Budget(max_nodes=3, max_depth=8, max_ahead=9)))
    growths = rest(engine)
    tree = growths[0].tree
    for growth in growths[1:]:
        tree = tree.merge(growth.tree.under(growth.path))
    ours = DraftEngine(LanguageModelDrafter(TableRunner(vocab_size=12, seed=4)))  # type: ignore[arg-type]
    ours.open(key, DraftOpen(SPECS[1], Budget(max_nodes=8, max_depth=8)))
    [whole] = rest(ours)
    assert len(tree.trace(whole.tree.token_ids)) > 3
    assert len(tree) > 8
    engine.close(key)
    assert not fake.texts


def test_of_several_places_one_is_computed_and_those_that_are_known_are_free() -> None:
    drafter, fake = on_vllm()
    [sequence] = opened(drafter, SPECS[1:2])
    sequence.num_candidates = 4
    sequence.branches = (Branch(-1, 3),)
    [first] = drafter.grow([sequence])
    assert [node.parent for node in first] == [-1, -1, -1]
    sequence.tree = TokenTree(tuple(node.token_id for node in first), (-1,) * 3)
    sequence.branches = (Branch(1, 1), Branch(-1, 4), Branch(2, 1))
    [second] = drafter.grow([sequence])
    assert [node.parent for node in second] == [1, -1]
    assert fake.num_passes == 2


def test_a_text_that_fills_the_context_can_be_taken_back() -> None:
    drafter, fake = on_vllm(context_length=10)
    [sequence] = opened(drafter, SPECS[1:2])
    for base in (8, 8, 9):
        sequence.ids = [*sequence.ids, *range(12)][:base]
        sequence.tree = TokenTree()
        while sequence.base + len(sequence.tree) <= drafter.info.context_length:
            grow(drafter, [sequence])
        assert len(sequence.tree) == 10 - base
    drafter.close(sequence.state)
    assert not fake.texts


def test_a_text_that_is_longer_than_the_context_is_not_fed() -> None:
    drafter, fake = on_vllm(context_length=10)
    engine, key = DraftEngine(drafter), Key(1, 1)
    engine.open(key, DraftOpen(SequenceSpec((1,) * 10, 10), Budget()))
    assert [growth.end for growth in rest(engine)] == [GrowthEnd.BUDGET]
    assert not fake.texts


def test_a_tree_in_flight_at_the_first_pass_can_be_taken_back() -> None:
    ours, (vllm, _) = LanguageModelDrafter(TableRunner(vocab_size=12, seed=4)), on_vllm()  # type: ignore[arg-type]
    trees = []
    for drafter in (ours, vllm):
        [sequence] = opened(drafter, SPECS[1:2])
        sequence.tree = TokenTree.chain([5, 6])
        grow(drafter, [sequence])
        sequence.ids += [7]  # nothing of it was accepted
        sequence.tree = TokenTree()
        for _ in range(3):
            grow(drafter, [sequence])
        trees.append(sequence.tree)
    assert trees[0] == trees[1]


def test_adapters_are_a_target_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both services may have one environment."""
    monkeypatch.setenv("SPECDEC_VLLM__ADAPTERS", '{"sql": "/adapters/sql"}')
    monkeypatch.setenv("SPECDEC_VLLM__MAX_NUM_SEQS", "5")
    vllm = DraftSettings(model="m", engine="vllm").vllm
    assert (vllm.adapters, vllm.max_num_seqs, "enforce_eager" in vllm.model_fields_set) == ({}, 5, False)
