"""What the contract says of a sequence on a target, and trees that are right for a while.

Knows rounds and texts; does not know how the engine keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import strategies as st

from specdec.core.rounds import Round, Verdict
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import ROOT, TokenTree
from testing.table_model import Table
from tests.models.table_reader import continuation

CONTEXT, VOCAB = 40, 12
TABLE = Table(VOCAB, acceptance=0.5, context_length=CONTEXT)


@dataclass
class Known:
    """The state of a sequence by the contract."""

    spec: SequenceSpec
    stops: frozenset[int]
    age: float
    num_preemptions: int = 0
    ids: list[int] = field(default_factory=list)
    last: int = 0
    pending: Round | None = None
    early: Round | None = None  # sent before the verdict on the pending one
    num_autonomous: int = 0
    passes: int = 0  # since it began to wait

    def text(self, count: int) -> list[int]:
        """What comes next, ``count`` tokens of it."""
        return continuation(TABLE, self.spec, self.ids, count)

    def answer(self, tree_gave_way: bool = False) -> Verdict:
        """The next verdict, by the contract alone; a tree that finds no memory gives way to the texts of its pass."""
        round_ = self.pending or Round(self.last, len(self.ids))
        root, left = self.left_of(round_)
        children = {(round_.tree.parents[node], round_.tree.token_ids[node]): node for node in left}
        if tree_gave_way:
            children = {}
        accepted: list[int] = []
        for token in self.text(CONTEXT):
            node = children.get((accepted[-1] if accepted else root, token))
            if node is None:
                return Verdict(round_.number, len(self.ids), tuple(accepted), token)
            accepted.append(node)
        raise AssertionError("a tree is shorter than the context")

    def left_of(self, round_: Round) -> tuple[int, list[int]]:
        """The node that the text has come to, and those below it that are verified."""
        edges = list(zip(round_.tree.parents, round_.tree.token_ids, strict=True))
        root = ROOT
        for token in self.ids[round_.base :]:
            if (root, token) not in edges:
                return ROOT, []
            root = edges.index((root, token))
        below = {root}
        for node, (parent, _) in enumerate(edges):
            if parent in below:
                below.add(node)
        left = sorted(below - {root})
        return root, left[: round_.max_nodes or len(left)]


def trees(known: Known, base: int) -> st.SearchStrategy[TokenTree]:
    """Chains and branches, some of them right for a while."""
    right = [*known.ids, *known.text(8)][base : base + 6]

    def grown(choices: list[tuple[int, int, bool]]) -> TokenTree:
        tokens: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        for where, token, follow in choices:
            parent = len(tokens) - 1 if where else where - 1 + (len(tokens) > 0) * (token % (len(tokens) + 1))
            depth = 0 if parent == ROOT else depths[parent] + 1
            token = right[depth] if follow and depth < len(right) else token
            if (parent, token) not in zip(parents, tokens, strict=True):
                tokens.append(token)
                parents.append(parent)
                depths.append(depth)
        return TokenTree(tuple(tokens), tuple(parents))

    choice = st.tuples(st.sampled_from([1, 1, 1, 0]), st.integers(0, VOCAB - 1), st.sampled_from([True] * 4 + [False]))
    return st.lists(choice, max_size=6).map(grown)
