"""Lookahead decoding: the target guesses for itself, several positions at once, and collects its guesses as n-grams.

A tree has two parts. The window is W parallel guesses of the next tokens, N - 1 levels deep, each level the target's
tokens after the one before, a pass earlier. The candidates are at most G n-grams that began with the root's token.
Any path of both may be accepted. Needs no training. (Fu et al. 2024, "Break the Sequential Dependency of LLM Inference
Using Lookahead Decoding".)
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.sampling.state import NO_TOKEN
from target_service.self_draft.trees import DraftRequest, Passed
from target_service.verifier import MAX_SELF_DRAFT_NODES

Gram = tuple[int, ...]

_MAX_FIRST_TOKENS = 4096
"""Of the n-grams of a text: about 4 MiB by default. What began with the oldest first token goes."""


class Pool:
    """The n-grams that were seen: of each first token the ``size`` latest ones, without that token."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._grams: OrderedDict[int, OrderedDict[Gram, None]] = OrderedDict()

    def add(self, gram: Sequence[int]) -> None:
        continuations = self._grams.setdefault(gram[0], OrderedDict())
        self._grams.move_to_end(gram[0])
        if len(self._grams) > _MAX_FIRST_TOKENS:
            self._grams.popitem(last=False)
        continuations[tuple(gram[1:])] = None
        continuations.move_to_end(tuple(gram[1:]))
        if len(continuations) > self._size:
            continuations.popitem(last=False)

    def after(self, token: int) -> list[Gram]:
        """The latest one first."""
        return list(reversed(self._grams.get(token, ())))


@dataclass(slots=True)
class Window:
    """``levels``: entry j of level 0 is a guess for position base + j, below entry j - 1 (the root). Entry i of level 1
    is one for base + i, below entry i - 1 of level 0; entry i of a later level follows entry i of the level before.
    ``nodes``: those of the entries in the tree that is being verified."""

    pool: Pool
    levels: list[list[int]] = field(default_factory=list)
    nodes: list[list[int]] = field(default_factory=list)


class Lookahead:
    """See self_draft/trees.py, SelfDrafter. ``width``, ``length``, ``candidates``: W, N and G of the paper."""

    kind = "lookahead"
    taps = None

    def __init__(self, width: int = 4, length: int = 3, candidates: int = 4) -> None:
        """Raises ValueError unless W is 2 or more, N 3 or more and G 1 or more, and for too large a tree."""
        if width < 2 or length < 3 or candidates < 1:
            raise ValueError("lookahead needs W of 2 or more, N of 3 or more and G of 1 or more")
        self._width, self._length, self._candidates = width, length, candidates
        self._num_window = width - 1 + width * (length - 2)
        self.num_nodes = self._num_window + candidates * (length - 1)
        if self.num_nodes > MAX_SELF_DRAFT_NODES:
            raise ValueError(
                f"lookahead verifies {self.num_nodes} nodes with this W, N and G; at most {MAX_SELF_DRAFT_NODES}"
            )

    def open(self, salt: bytes) -> Window:
        return Window(Pool(self._candidates))

    def num_rows(self, state: Window) -> None:
        return None

    def grow(self, requests: Sequence[DraftRequest[Window]]) -> list[TokenTree]:
        return [self._tree(request.state, request.ids, request.max_nodes) for request in requests]

    def _tree(self, window: Window, ids: Sequence[int], max_nodes: int) -> TokenTree:
        """The candidates, the latest first, then the window; without room for the window it is empty."""
        window.nodes = []
        if max_nodes < self._num_window:
            return EMPTY_TREE
        if not window.levels:
            window.levels = [_random(ids, self._width - 1)]
        tree = _MergedTree()
        for gram in window.pool.after(ids[-1])[: (max_nodes - self._num_window) // (self._length - 1)]:
            node = ROOT
            for token in gram:
                node = tree.child(node, token)
        first, above = [], ROOT
        for token in window.levels[0]:
            above = tree.child(above, token)
            first.append(above)
        window.nodes, parents = [first], [ROOT, *first]
        for level in window.levels[1:]:
            parents = [tree.child(parent, token) for parent, token in zip(parents, level, strict=False)]
            window.nodes.append(parents)
        return TokenTree(tuple(tree.token_ids), tuple(tree.parents))

    def learn(self, state: Window, passed: Passed) -> None:
        """Make the target's tokens after the last level the next one, and move on by one position."""
        nodes, state.nodes = state.nodes, []
        decision = passed.decision
        if not nodes or decision is None or len(decision.predictions) <= max(map(max, nodes)) + 1:
            return  # no tree, or no memory for it
        root = passed.ids[-1]
        last = nodes[-1] if len(nodes) > 1 else [ROOT, *nodes[0]]
        predictions = [decision.predictions[1 + node] for node in last]
        # After a node that a grammar forbids the target has no token.
        substitutes = zip(predictions, _random(passed.ids, len(last)), strict=True)
        state.levels.append([other if token == NO_TOKEN else token for token, other in substitutes])
        starts = [root, *state.levels[0]]
        if len(state.levels) < self._length:
            state.levels = [level[1:] for level in state.levels]
        else:
            for entry in range(self._width):
                state.pool.add([starts[entry], *(level[entry] for level in state.levels[1:])])
            state.levels = [state.levels[1][1:], *state.levels[2:]]
        sizes = [self._width - 1] + [self._width] * (len(state.levels) - 1)
        for level, size in zip(state.levels, sizes, strict=True):
            level += _random(passed.ids, size - len(level))


class _MergedTree:
    """A tree in which equal siblings are one node."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.parents: list[int] = []
        self._nodes: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int:
        if (parent, token) not in self._nodes:
            self._nodes[parent, token] = len(self.token_ids)
            self.token_ids.append(token)
            self.parents.append(parent)
        return self._nodes[parent, token]


def _random(ids: Sequence[int], count: int) -> list[int]:
    """Tokens of the text, the same ones for the same text: guesses where there is nothing better."""
    rng = random.Random(len(ids))
    return [ids[rng.randrange(len(ids))] for _ in range(count)]
