"""A draft's engine, stepped by hand, around a table without logits or a table that is a language model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from draft_service.drafter import Branch, DraftSequence
from draft_service.drafters.language_model import LanguageModelDrafter
from draft_service.engine import DraftEngine, DraftOpen
from specdec.core.rounds import Advance, Budget, Growth
from specdec.core.sequence import SamplingParams, SequenceSpec
from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.server.step_loop import Key
from testing.misbehaving import Misbehaving
from testing.table_model import Table, TableDrafter
from tests.models.table_reader import continuation
from tests.models.table_runner import TableRunner

CONTEXT, VOCAB = 30, 8
TABLE = Table(VOCAB, acceptance=1.0, context_length=CONTEXT)
A, B = Key(1, 1), Key(1, 2)
SAMPLINGS = [
    SamplingParams(0.0),
    SamplingParams(0.8),
    SamplingParams(1.0, top_k=3),
    SamplingParams(0.7, presence_penalty=1.5, repetition_penalty=1.3),
]


def rest(engine: DraftEngine, limit: int = 100) -> list[Any]:
    """What is answered until nothing is left to do."""
    return [result for _, result in rest_by_key(engine, limit)]


def rest_by_key(engine: DraftEngine, limit: int = 100) -> list[tuple[Key, Any]]:
    results: list[tuple[Key, Any]] = []
    while not engine.idle:
        results += engine.step()
        limit -= 1
        assert limit, "the engine never comes to rest"
    return results


def sequence_of(engine: DraftEngine, key: Key = A) -> DraftSequence:
    """As the engine has it."""
    return engine._works[key].sequence


# --- a table without logits, which proposes one node a pass ----------------------------------------------------


def plain_drafter() -> Misbehaving:
    """It grows nothing ahead."""
    drafter = Misbehaving(TableDrafter(TABLE), records=True)
    drafter.info = TABLE.info("table-draft")
    return drafter


def plain(ids: Sequence[int] = (1, 2), nodes: int = 0, **spec: Any) -> tuple[DraftEngine, Misbehaving]:
    """An engine with sequence A, and its drafter."""
    drafter = plain_drafter()
    engine = DraftEngine(drafter)
    open_plain(engine, A, ids, nodes, **spec)
    return engine, drafter


def open_plain(engine: DraftEngine, key: Key, ids: Sequence[int] = (1, 2), nodes: int = 0, **spec: Any) -> None:
    engine.open(key, DraftOpen(SequenceSpec(tuple(ids), len(ids), **spec), Budget(nodes, nodes)))


def proposed(ids: Sequence[int], count: int, spec: SequenceSpec | None = None) -> list[int]:
    """The drafter's own chain after ids, which the table's target would accept."""
    return continuation(TABLE, spec or SequenceSpec(tuple(ids), 1), ids, count)


# --- a language model, which may grow ahead --------------------------------------------------------------------


def runner(num_slots: int = 4096) -> TableRunner:
    return TableRunner(seed=3, num_slots=num_slots)


def opened(
    sampling: SamplingParams,
    ids: tuple[int, ...] = (1, 2, 3),
    table: TableRunner | None = None,
    budget: Budget | None = None,
    **spec: Any,
) -> DraftEngine:
    engine = DraftEngine(LanguageModelDrafter(table or runner()))
    engine.open(A, DraftOpen(SequenceSpec(ids, len(ids), sampling, 7, **spec), budget or Budget()))
    rest(engine)
    return engine


def grown(sampling: SamplingParams, budget: Budget, table: TableRunner | None = None) -> TokenTree:
    """What one advance gives."""
    engine = opened(sampling, table=table)
    engine.submit(A, Advance(1, 3, budget=budget))
    return together(rest(engine))


def together(growths: Sequence[Growth], known: TokenTree = EMPTY_TREE) -> TokenTree:
    """The tree of the last of them: all growths of its advance, added to what was ``known`` before."""
    tree = known
    for growth in growths:
        if growth.advance == growths[-1].advance:
            tree = tree.merge(growth.tree.under(growth.path))
    return tree


def paths(tree: TokenTree) -> list[list[int]]:
    """The tokens from the root to each node."""
    return [list(tree.path_ids(node)) for node in range(len(tree))]


def children(tree: TokenTree, node: int) -> list[int]:
    return [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == node]


def ranked(sampling: SamplingParams, ids: list[int], count: int = 8) -> list[int]:
    """What the draft proposes after a text, most likely first, if it is asked for nothing else."""
    drafter = LanguageModelDrafter(runner())
    spec = SequenceSpec(tuple(ids), 3, sampling, 7)
    sequence = DraftSequence(
        spec, list(ids), state=drafter.open(spec), branches=(Branch(ROOT, count),), num_candidates=count
    )
    [nodes] = drafter.grow([sequence])
    return [node.token_id for node in nodes]  # type: ignore[union-attr]


def check_proposed(sampling: SamplingParams, ids: list[int], tree: TokenTree, all_grown: bool = True) -> None:
    """The first child of every node is what the draft proposes there; others are its runners-up, in their order, if
    it has grown them all."""
    text = [[], *paths(tree)]
    for node in range(ROOT, len(tree)):
        if present := children(tree, node):
            after = ranked(sampling, [*ids, *text[node + 1]])
            assert present[: None if all_grown else 1] == after[: len(present) if all_grown else 1]
