"""A target's engine around a table, stepped by hand, with every text put together from its verdicts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from specdec.core.rounds import Round, TargetOpen, Verdict
from specdec.core.sequence import Method, SequenceSpec
from specdec.core.tree import EMPTY_TREE, TokenTree
from specdec.server.step_loop import Key, Results, noop
from target_service.engine import TargetEngine
from testing.misbehaving import Misbehaving
from testing.table_model import TableMemory, TableVerifier
from tests.models.table_reader import continuation
from tests.target_service.contract_model import TABLE

chain = TokenTree.chain
A, B = Key(1, 1), Key(1, 2)


def said(ids: list[int], count: int) -> list[int]:
    """The next tokens after ids."""
    return continuation(TABLE, SequenceSpec(tuple(ids), 1), ids, count)


class AnyMethod(TableVerifier):
    """A table that takes chains without distributions under token and block, too: certain of each node."""

    def open(self, spec: SequenceSpec) -> TableMemory:
        return super().open(dataclasses.replace(spec, method=Method.COUPLED))


class Engine(TargetEngine):
    """Keeps the texts as an orchestrator does: by its own trees and what the verdicts say of them."""

    def __init__(self, max_sequences: int = 1024) -> None:
        self.verifier = Misbehaving(AnyMethod(TABLE), records=True)
        super().__init__(self.verifier, max_sequences)
        self.texts: dict[Key, list[int]] = {}
        self._trees: dict[tuple[Key, int], TokenTree] = {}

    def open(self, key: Key, open_: TargetOpen) -> None:
        super().open(key, open_)
        self.texts[key] = list(open_.spec.token_ids)

    def submit(self, key: Key, round_: Round, arrived: float | None = None) -> None:
        super().submit(key, round_, arrived)
        self._trees[key, round_.number] = round_.tree

    def step(self, poll: Callable[[], None] = noop) -> Results:
        results = super().step(poll)
        for key, result in results:
            if isinstance(result, Verdict):
                assert result.base == len(self.texts[key])
                tree = self._trees.get((key, result.round), EMPTY_TREE)
                self.texts[key] += [*(tree.token_ids[node] for node in result.accepted), result.next_token]
        return results


def opened(ids=(1, 2), *, key=A, engine=None, first=True, **options) -> tuple[Engine, Misbehaving]:
    """An engine with a sequence of which, if ``first``, the first token is decided."""
    engine = engine or Engine()
    spec = {name: options.pop(name) for name in ("method", "sampling") if name in options}
    engine.open(key, TargetOpen(SequenceSpec(tuple(ids), 2, **spec), **options))
    if first:
        engine.step()
    return engine, engine.verifier


def run(engine: Engine, limit: int = 100) -> list[Verdict]:
    """The verdicts until nothing waits."""
    verdicts = []
    while not engine.idle and limit:
        verdicts += [verdict for _, verdict in engine.step()]
        limit -= 1
    return verdicts
