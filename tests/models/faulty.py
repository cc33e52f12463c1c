"""Table models that misbehave on command, or that propose branches; no torch."""

from __future__ import annotations

from typing import Any

from bench.models.table_model import TableDrafter, TableVerifier
from draft_service.drafter import DraftSequence, Node
from specdec.core.errors import Preempted
from specdec.core.tree import ROOT
from tests.models.gated import Gated


class FaultyVerifier(TableVerifier):
    """Preempts somebody, or fails, in as many of the next passes as it is told."""

    to_preempt = to_fail = 0

    def verify(self, jobs: Any) -> Any:
        if self.to_fail:
            self.to_fail -= 1
            raise RuntimeError("planted")
        if self.to_preempt:
            self.to_preempt -= 1
            decisions, timings = super().verify(jobs[1:])
            return [Preempted("planted"), *decisions], timings
        return super().verify(jobs)


class GatedFaulty(Gated, FaultyVerifier):
    """Does so in the passes after a gate."""


class BranchingDrafter(TableDrafter):
    """The guess and a sibling at every level."""

    def grow(self, sequences: list[DraftSequence]) -> list[Any]:  # type: ignore[override]
        return [self._level(sequence) for sequence in sequences]

    def _level(self, sequence: DraftSequence) -> list[Node]:
        tree, node = sequence.tree, len(sequence.tree) - 1
        path: list[int] = []
        above = node
        while above != ROOT:
            path.insert(0, tree.token_ids[above])
            above = tree.parents[above]
        text = [*sequence.ids[-3:], *path]
        guess = self._table.guess(sequence.spec, text, sequence.base + len(path))
        return [Node(node, (guess + 7) % self.info.vocab_size), Node(node, guess)]
