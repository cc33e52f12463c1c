"""Token Recycling proposes what the target last found likeliest after a token, accepted or not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.sampling.state import SamplingState
from target_service.self_draft.recycling import Recycling
from target_service.self_draft.trees import DraftRequest, Passed, SelfDraftTrees
from target_service.verifier import Decision

VOCAB = 12
CACHE: Any = None


def logits(*likeliest: int) -> list[float]:
    """Of a row with these tokens first, in this order."""
    return [float(VOCAB - likeliest.index(token)) if token in likeliest else 0.0 for token in range(VOCAB)]


def passed(
    own: SelfDraftTrees, state: Any, ids: list[int], tree: TokenTree, rows: list[list[float]], *nodes: int
) -> None:
    """Tell of a pass over the root and the tree, of which ``nodes`` were accepted."""
    outputs: Any = SimpleNamespace(logits=torch.tensor(rows))
    own.learn(state, Passed(CACHE, ids, len(ids) - 1, None, tree, outputs, Decision(nodes, 0)))


def next_tree(own: SelfDraftTrees, state: Any, ids: list[int], num: int, temperature: float = 0.0) -> TokenTree:
    spec = SequenceSpec(ids, len(ids), SamplingParams(temperature), 1, Method.COUPLED)
    [tree] = own.grow([DraftRequest(state, CACHE, SamplingState(spec), ids, num)])
    return tree


def test_a_tree_has_the_likeliest_tokens_after_each_of_its_tokens():
    own = SelfDraftTrees(Recycling(VOCAB), [[0], [1], [0, 0], [0, 1], [1, 0]])
    state = own.open(b"")
    assert next_tree(own, state, [3], 8) == EMPTY_TREE  # nothing is known
    tree = TokenTree((5, 6), (-1, -1))
    passed(own, state, [3], tree, [logits(7, 5), logits(8, 9), logits(10, 11)])  # both rejected
    passed(own, state, [3, 7], EMPTY_TREE, [logits(5, 6)])
    found = next_tree(own, state, [3, 7], 8)
    assert (found.token_ids, found.parents) == ((5, 6, 8, 9, 10), (-1, -1, 0, 0, 1))


def test_of_equal_tokens_in_a_pass_that_of_the_text_counts():
    own = SelfDraftTrees(Recycling(VOCAB), [[0]])
    state = own.open(b"")
    twice = TokenTree((4, 4), (-1, 0))
    passed(own, state, [3], twice, [logits(4), logits(6), logits(8)], 0)  # the second one is rejected
    assert next_tree(own, state, [3, 4], 1).token_ids == (6,)


def test_a_row_with_nan_is_not_learnt():
    own = SelfDraftTrees(Recycling(VOCAB), [[0]])
    state = own.open(b"")
    passed(own, state, [3], EMPTY_TREE, [logits(4)])
    passed(own, state, [3], EMPTY_TREE, [[float("nan")] * VOCAB])
    assert next_tree(own, state, [3], 1).token_ids == (4,)


def test_sequences_of_a_salt_share_what_is_learnt_and_the_oldest_salt_is_forgotten():
    own = SelfDraftTrees(Recycling(VOCAB), [[0]])
    passed(own, own.open(b"a"), [3], EMPTY_TREE, [logits(4)])
    assert next_tree(own, own.open(b"a"), [3], 1)
    assert not next_tree(own, own.open(b"b"), [3], 1)
    for number in range(32):
        own.open(bytes([number]))
    assert not next_tree(own, own.open(b"a"), [3], 1)


def test_coupled_guesses_have_the_noise_of_the_draw():
    """At equal logits each position has guesses of its own."""
    own = SelfDraftTrees(Recycling(VOCAB), [[0]])
    state = own.open(b"")
    passed(own, state, [3], EMPTY_TREE, [logits()])
    firsts = {next_tree(own, state, [3] * length, 1, 1.0).token_ids for length in range(1, 30)}
    assert len(firsts) > 3
