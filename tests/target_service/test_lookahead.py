"""Lookahead decoding as the paper describes it, without trees: the same windows, n-grams and accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from specdec.core.tree import ROOT, TokenTree
from specdec.speculation.verification import descend
from target_service.self_draft.lookahead import Lookahead, Pool, Window, _random
from target_service.self_draft.trees import DraftRequest, Passed
from target_service.verifier import Decision


def target(text: Sequence[int]) -> int:
    """The next token of a text that comes back to itself now and then."""
    return (text[-1] * 7 + text[-2] * 3 + (len(text) % 40 == 0)) % 19


class Paper:
    """Window and pool of one text. Every path is a list of its own."""

    def __init__(self, width: int, length: int, candidates: int) -> None:
        self.width, self.length, self.candidates = width, length, candidates
        self.levels: list[list[int]] = []
        self.pool: dict[int, list[tuple[int, ...]]] = {}

    def path(self, level: int, entry: int) -> list[int]:
        if not level:
            return self.levels[0][: entry + 1]
        return [*self.levels[0][:entry], *(self.levels[above][entry] for above in range(1, level + 1))]

    def step(self, text: list[int]) -> list[int]:
        """The tokens of one round."""
        if not self.levels:
            self.levels = [_random(text, self.width - 1)]
        paths = [list(gram) for gram in reversed(self.pool.get(text[-1], []))]
        paths += [self.path(level, entry) for level, row in enumerate(self.levels) for entry in range(len(row))]
        found: list[int] = []
        for path in paths:
            right = list(text)
            for token in path:
                if token != target(right):
                    break
                right.append(token)
            found = max(found, right[len(text) :], key=len)
        found = [*found, target([*text, *found])]
        last = len(self.levels) - 1
        if last:
            said = [target(text + self.path(last, entry)) for entry in range(self.width)]
        else:
            said = [target(text + self.levels[0][:entry]) for entry in range(self.width)]
        if last + 2 < self.length:
            self.levels = [row[1:] for row in [*self.levels, said]]
        else:
            for entry in range(self.width):
                first = self.levels[0][entry - 1] if entry else text[-1]
                gram = (*(row[entry] for row in self.levels[1:]), said[entry])
                grams = [each for each in self.pool.get(first, []) if each != gram]
                self.pool[first] = [*grams, gram][-self.candidates :]
            self.levels = [self.levels[1][1:], *self.levels[2:], said]
        for level, row in enumerate(self.levels):
            row += _random(text, self.width - (level == 0) - len(row))
        return found


def decision(tree: TokenTree, ids: list[int]) -> Decision:
    texts = {ROOT: ids}
    for node, parent in enumerate(tree.parents):
        texts[node] = [*texts[parent], tree.token_ids[node]]
    predictions = [target(texts[node]) for node in range(-1, len(tree))]
    nodes, following = descend(tree.token_ids, tree.parents, predictions)
    return Decision(tuple(nodes), following, tuple(predictions))


@pytest.mark.parametrize(("width", "length", "candidates"), [(2, 3, 1), (4, 3, 4), (7, 5, 7), (5, 4, 3)])
def test_the_tokens_of_each_round_are_those_of_the_paper(width: int, length: int, candidates: int):
    own, paper = Lookahead(width, length, candidates), Paper(width, length, candidates)
    window: Window = own.open(b"")
    nothing: Any = None
    ids, rounds = [3, 5, 3, 8], 0
    while len(ids) < 400:
        [tree] = own.grow([DraftRequest(window, nothing, nothing, ids, own.num_nodes)])
        assert len(tree) <= own.num_nodes
        made = decision(tree, ids)
        expected = paper.step(ids)
        assert [*(tree.token_ids[node] for node in made.accepted), made.next_token] == expected
        own.learn(window, Passed(nothing, ids, len(ids) - 1, None, tree, None, made))
        assert window.levels == paper.levels
        assert {token: list(reversed(window.pool.after(token))) for token in paper.pool} == paper.pool
        ids, rounds = [*ids, *expected], rounds + 1
    assert rounds < 380  # it pays


def test_a_long_text_has_the_n_grams_of_its_latest_tokens():
    pool = Pool(2)
    for token in range(100_000):
        pool.add([token % 50_000, token, token])
    found = [token for token in range(50_000) if pool.after(token)]
    assert found == list(range(50_000 - len(found), 50_000))
    assert 1000 < len(found) < 10_000
    assert pool.after(49_999) == [(99_999, 99_999)]


def test_rounds_of_other_trees_leave_the_window_as_it_is():
    own = Lookahead(4, 3, 4)
    window: Window = own.open(b"")
    nothing: Any = None
    ids = [3, 5, 3, 8]
    for _ in range(5):
        [tree] = own.grow([DraftRequest(window, nothing, nothing, ids, own.num_nodes)])
        made = decision(tree, ids)
        own.learn(window, Passed(nothing, ids, 3, None, tree, None, made))
        ids = [*ids, *(tree.token_ids[node] for node in made.accepted), made.next_token]
    before = [list(level) for level in window.levels]
    chain = TokenTree.chain([1, 2])
    own.learn(window, Passed(nothing, ids, 3, None, chain, None, decision(chain, ids)))
    assert window.levels == before
    [tree] = own.grow([DraftRequest(window, nothing, nothing, ids, 3)])  # no room for the window
    assert not tree
