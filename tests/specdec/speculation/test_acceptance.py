"""The acceptance model: the chance of each guess by its rank, and the nodes that are worth verifying."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.speculation.acceptance import PRIOR, AcceptanceModel, CallersAcceptance
from tests.specdec.core.trees import chances_by_hand, trees


@pytest.mark.parametrize("shares", [(0.7, 0.1, 0.3), (0.4, 0.35, 0.0)])
def test_the_shares_of_the_ranks_are_learnt_whatever_the_trees_look_like(shares):
    chances, rng = AcceptanceModel(), random.Random(1)
    for _ in range(4000):
        # Two levels, each with one to three children; the text goes on by the shares.
        tree = EMPTY_TREE
        for parent in (ROOT, 0):
            count = rng.randint(1, 3)
            size = len(tree)
            tree = TokenTree((*tree.token_ids, *range(size, size + count)), (*tree.parents, *[parent] * count))
        path, node = [], ROOT
        while children := [child for child, parent in enumerate(tree.parents) if parent == node]:
            right = [child for child, share in zip(children, shares, strict=False) if rng.random() < share]
            if not right:
                break
            path.append(node := right[0])
        chances.observe(tree, path, ended=True)
    wrong = 1.0
    for found, share in zip(chances.of_ranks, shares, strict=False):
        assert found == pytest.approx(wrong * share, abs=0.06)
        wrong *= 1 - share


def test_tokens_that_were_not_tried_teach_nothing():
    tree = TokenTree.chain([5, 6, 7])
    never, cut = AcceptanceModel(), AcceptanceModel()
    never.observe(tree, [0], ended=False)
    cut.observe(tree.prefix(1), [0], ended=True)
    assert never.of_ranks == cut.of_ranks, "what would have come after the first token is not known"
    assert AcceptanceModel().of_ranks[0] < never.of_ranks[0]
    ended = AcceptanceModel()
    ended.observe(tree, [0], ended=True)
    assert ended.of_ranks[0] < never.of_ranks[0]


def test_it_learns_from_committed_tokens_and_returns_the_tree_below_them():
    tree, chances = TokenTree.chain([5, 6]).merge(TokenTree.chain([8, 9])), AcceptanceModel()
    for committed, left in (([8], TokenTree.chain([9])), ([8, 1], EMPTY_TREE), ([], tree)):
        assert chances.descended(tree, committed) == left
        assert chances.of_ranks[1] > AcceptanceModel().of_ranks[1]


def test_a_sequence_begins_with_what_all_have_learnt_and_goes_its_own_way():
    of_all = AcceptanceModel()
    for _ in range(200):
        AcceptanceModel(of_all).observe(TokenTree.chain([1]), [], ended=True)
    assert of_all.of_ranks[0] < 0.1
    own = AcceptanceModel(of_all)
    assert own.of_ranks[0] == pytest.approx(of_all.of_ranks[0])
    for _ in range(60):
        own.observe(TokenTree.chain([1]), [0], ended=True)
    assert own.of_ranks[0] > 0.85 > of_all.of_ranks[0]
    own.forget()
    for _ in range(12):
        own.observe(TokenTree.chain([1]), [], ended=True)
    assert own.of_ranks[0] < 0.4


@given(st.lists(st.tuples(trees(), st.booleans()), max_size=20))
def test_chances_lie_between_0_and_1_in_all(observed):
    chances = AcceptanceModel(AcceptanceModel())
    for tree, ended in observed:
        chances.observe(tree, [0] if tree else [], ended)
    assert len(chances.of_ranks) == len(PRIOR)
    assert min(chances.of_ranks) >= 0
    assert sum(chances.of_ranks) <= 1 + 1e-9


def test_the_chance_of_a_guess_depends_on_the_drafts_confidence():
    of_all, rng = AcceptanceModel(), random.Random(2)
    own = AcceptanceModel(of_all)
    shares = {3: 0.4, 9: 0.9}
    for _ in range(2000):
        confidence = rng.choice([3, 9])
        right = rng.random() < shares[confidence]
        tree = TokenTree((1, 2), (ROOT, ROOT), confidence=(confidence, confidence))
        own.observe(tree, [0] if right else [1] if confidence == 3 else [], ended=True)
    for confidence, share in shares.items():
        assert of_all.at_confidence(confidence)[0] == pytest.approx(share, abs=0.1)
        assert own.at_confidence(confidence)[0] == pytest.approx(share, abs=0.15)
    assert of_all.at_confidence(5)[0] == pytest.approx(of_all.of_ranks[0]), "never seen"
    tokens, parents = (5, 6, 7), (ROOT, 0, ROOT)
    for confidence, best in (((9, 9, 9), (5, 6)), ((3, 9, 3), (5, 7)), ((0, 9, 3), (5, 7))):
        assert own.best(TokenTree(tokens, parents, confidence=confidence), 2).token_ids == best


def test_a_draft_that_is_better_for_a_text_is_better_at_every_confidence():
    of_all = AcceptanceModel()
    poor, good = AcceptanceModel(of_all), AcceptanceModel(of_all)
    for number in range(600):
        confidence = (3, 9)[number % 2]
        tree, often = TokenTree((1,), (ROOT,), confidence=(confidence,)), number % 4
        poor.observe(tree, [0] if confidence == 9 and often else [], ended=True)
        good.observe(tree, [0] if confidence == 9 or often else [], ended=True)
    for confidence in (3, 9):
        low, middle, high = (model.at_confidence(confidence)[0] for model in (poor, of_all, good))
        assert low < middle < high


@given(trees(), st.lists(st.floats(0.1, 9), min_size=1, max_size=9))
def test_no_other_number_of_nodes_promises_more_per_second(tree, rounds):
    chances = AcceptanceModel()
    part = chances.most_per_second(tree, rounds)
    assert part.problem(100) is None
    assert bool(part) == (bool(tree) and len(rounds) > 1)
    of_nodes = sorted(chances_by_hand(tree, chances.of_ranks), reverse=True)
    rates = [(1 + sum(of_nodes[:number])) / seconds for number, seconds in enumerate(rounds) if number <= len(tree)]
    assert not part or rates[len(part)] == pytest.approx(max(rates[1:]))


def test_other_texts_teach_at_once_and_no_guess_is_likelier_than_one_before_it():
    of_all = AcceptanceModel()
    resting, other = AcceptanceModel(of_all), AcceptanceModel(of_all)
    before = resting.of_ranks
    for _ in range(200):
        other.observe(TokenTree((1, 2), (ROOT, ROOT), confidence=(4, 4)), [1], ended=True)
    assert resting.of_ranks == pytest.approx(AcceptanceModel(of_all).of_ranks) != before
    for confidence in (0, 4):
        assert resting.at_confidence(confidence) == sorted(resting.at_confidence(confidence), reverse=True)
        assert sum(resting.at_confidence(confidence)) <= 1


def shown(model: AcceptanceModel, acceptance: float, times: int, seed: int = 0) -> AcceptanceModel:
    """After chains of one node that were accepted so often."""
    chance = random.Random(seed)
    for _ in range(times):
        model.observe(TokenTree.chain([1]), [0] if chance.random() < acceptance else [], ended=True)
    return model


@pytest.mark.parametrize(("before", "after"), [(0.8, 0.0), (0.1, 0.9), (0.9, 0.3)])
def test_a_text_that_changes_is_seen_at_once_and_its_prior_no_longer_counts(before, after):
    of_all = shown(AcceptanceModel(), before, 400)
    text = shown(AcceptanceModel(of_all), before, 200)
    assert text.of_ranks[0] == pytest.approx(before, abs=0.15)
    assert shown(text, after, 25, seed=1).of_ranks[0] == pytest.approx(after, abs=0.25)


def test_a_text_that_does_not_change_is_known_well():
    """What looks like a change by accident is rare."""
    text, chance = AcceptanceModel(AcceptanceModel()), random.Random(2)
    off = 0
    for number in range(20_000):
        text.observe(TokenTree.chain([1]), [0] if chance.random() < 0.8 else [], ended=True)
        off += number > 100 and abs(text.of_ranks[0] - 0.8) > 0.15
    assert off < 200


def test_a_callers_next_text_begins_with_what_its_texts_have_shown():
    callers = CallersAcceptance()
    for seed in range(12):
        shown(callers.of_text(b"good"), 0.9, 20, seed)
        shown(callers.of_text(b"poor"), 0.1, 20, seed)
    rates = {caller: callers.of_text(caller).of_ranks[0] for caller in (b"good", b"poor", b"new")}
    assert rates[b"good"] > 0.75
    assert rates[b"poor"] < 0.25
    assert 0.3 < rates[b"new"] < 0.7, "what all have shown"
    for number in range(5000):
        callers.of_text(number.to_bytes(2))
    assert callers.of_text(b"good").of_ranks[0] == pytest.approx(rates[b"new"]), "of so many none is kept for ever"


@given(trees(), st.integers(0, 12))
def test_the_best_part_of_a_tree_is_a_tree_and_no_part_is_likelier(tree, num_nodes):
    chances = AcceptanceModel()
    part = chances.best(tree, num_nodes)
    assert part.problem(100) is None
    assert len(part) == min(num_nodes, len(tree))
    assert part.merge(tree).merge(EMPTY_TREE).problem(100) is None
    assert len(part.merge(tree)) == len(tree), "nothing but nodes of the tree, where they were"
    of_nodes = chances_by_hand(tree, chances.of_ranks)
    kept = sum(of_nodes[token] for token in part.token_ids)
    assert kept == pytest.approx(sum(sorted(of_nodes, reverse=True)[: len(part)]))
