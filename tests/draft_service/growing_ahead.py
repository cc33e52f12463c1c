"""An engine around a table model that grows ahead, and what is said of it."""

from __future__ import annotations

from collections.abc import Sequence

from draft_service.drafter import DraftSequence, Spot
from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.rounds import Budget, Growth
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.server.step_loop import Key
from tests.models.table_runner import TableRunner

A, B = Key(1, 1), Key(1, 2)
SAMPLINGS = [
    SamplingParams(0.0),
    SamplingParams(0.8),
    SamplingParams(1.0, top_k=3),
    SamplingParams(0.7, presence_penalty=1.5, repetition_penalty=1.3),
]


def runner(num_slots: int = 4096) -> TableRunner:
    return TableRunner(seed=3, num_slots=num_slots)


def opened(sampling: SamplingParams, ids: tuple[int, ...] = (1, 2, 3), **options: int) -> DraftEngine:
    engine = DraftEngine(LanguageModelDrafter(runner(**options)))
    engine.open(A, DraftOpen(SequenceSpec(ids, len(ids), sampling, 7), Budget()))
    rest(engine)
    return engine


def rest(engine: DraftEngine, limit: int = 100) -> list[Growth]:
    """What is answered until nothing is left to do."""
    growths = []
    while not engine.idle:
        growths += [growth for _, growth in engine.step()]
        limit -= 1
        assert limit, "the engine never comes to rest"
    return growths


def together(growths: Sequence[Growth], known: TokenTree = EMPTY_TREE) -> TokenTree:
    """What has come of the advance of the last of them, to what was ``known`` before."""
    tree = known
    for growth in growths:
        if growth.advance == growths[-1].advance:
            tree = tree.merge(growth.tree.under(growth.path))
    return tree


def said(sampling: SamplingParams, ids: list[int]) -> int:
    """What the draft proposes after a text, asked for nothing else."""
    drafter = LanguageModelDrafter(runner())
    spec = SequenceSpec(tuple(ids), 3, sampling, 7)
    [[node]] = drafter.grow([DraftSequence(spec, list(ids), memory=drafter.open(spec))])  # type: ignore[misc]
    return node.token_id


def paths(tree: TokenTree) -> list[list[int]]:
    """The tokens from the root to each node."""
    found: list[list[int]] = []
    for token, parent in zip(tree.token_ids, tree.parents, strict=True):
        found.append([*(found[parent] if parent != ROOT else []), token])
    return found


def children(tree: TokenTree, node: int) -> list[int]:
    return [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == node]


def ranked(sampling: SamplingParams, ids: list[int]) -> list[int]:
    """The same with all runners-up, likeliest first."""
    drafter = LanguageModelDrafter(runner())
    spec = SequenceSpec(tuple(ids), 3, sampling, 7)
    sequence = DraftSequence(spec, list(ids), memory=drafter.open(spec), spots=(Spot(ROOT, 8),), num_guesses=8)
    [nodes] = drafter.grow([sequence])
    return [node.token_id for node in nodes]  # type: ignore[union-attr]


def check_said(sampling: SamplingParams, ids: list[int], tree: TokenTree, all_grown: bool = True) -> None:
    """The first child of every node is what the draft says there; others are its runners-up, in their order, if it has
    grown them all."""
    text = [[], *paths(tree)]
    for node in range(ROOT, len(tree)):
        if found := children(tree, node):
            after = [*ids, *text[node + 1]]
            assert found[0] == said(sampling, after)
            if all_grown:
                assert found == ranked(sampling, after)[: len(found)]
