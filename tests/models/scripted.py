"""Drafters that no one would deploy: random tokens, and branching trees with the truth hidden in odd places."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from typing import Any

from draft_service.drafter import DraftSequence
from specdec.core.errors import SpecdecError
from specdec.core.rounds import ModelInfo, Timings
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import ROOT, Candidate, TokenTree
from target_service.language_model import LmVerifier
from target_service.verifier import Decision, Job

Continuation = Callable[[SequenceSpec], Sequence[int]]
"""What the target alone makes of a sequence: its output ids, from the prompt on."""


class Scripted:
    """The verbs of a drafter without a model. Its memory is a random generator of the sequence's own."""

    def __init__(self, target: ModelInfo) -> None:
        self.info = dataclasses.replace(target, name=type(self).__name__, model_digest=type(self).__name__)

    def open(self, spec: SequenceSpec) -> random.Random:
        return random.Random(hash((tuple(spec.token_ids), spec.seed, spec.sampling)))

    def close(self, memory: Any) -> None: ...

    def request_yield(self, requested: bool) -> None: ...

    def cache_use(self) -> tuple[int, int]:
        return 0, 0

    def learn(self, sequences: Sequence[DraftSequence]) -> list[SpecdecError | bool]:
        return [True] * len(sequences)

    def grow(self, sequences: Sequence[DraftSequence]) -> list[Sequence[Candidate] | SpecdecError | None]:
        return [self.next_nodes(sequence, sequence.state) for sequence in sequences]

    def next_nodes(self, sequence: DraftSequence, rng: random.Random) -> Sequence[Candidate]:
        raise NotImplementedError


class RandomDrafter(Scripted):
    """A chain of tokens that have nothing to do with the text."""

    def next_nodes(self, sequence: DraftSequence, rng: random.Random) -> Sequence[Candidate]:
        return [Candidate(len(sequence.tree) - 1, rng.randrange(self.info.vocab_size))]


class BranchingDrafter(Scripted):
    """Random trees. The target's own continuation is hidden in most of them, behind siblings that are wrong.

    Wrong tokens are ones that do occur in the continuation, so that a node that is judged by another node's row
    has a chance to be accepted.
    """

    def __init__(self, target: ModelInfo, continuation: Continuation) -> None:
        super().__init__(target)
        self._continuation = continuation

    def next_nodes(self, sequence: DraftSequence, rng: random.Random) -> Sequence[Candidate]:
        spec = sequence.spec
        truth = list(self._continuation(spec))
        done = list(sequence.ids[spec.num_prompt_tokens :])
        ahead = truth[len(done) :] if truth[: len(done)] == done else []
        tree = sequence.tree
        nodes: list[Candidate] = []
        on_path = _deepest_on(tree, ahead)
        for parent in {on_path, rng.randrange(-1, len(tree))}:
            taken = {token for token, other in zip(tree.token_ids, tree.parents, strict=True) if other == parent}
            wanted = [rng.choice(truth) if rng.random() < 0.7 else rng.randrange(self.info.vocab_size)]
            if rng.random() < 0.3:
                wanted.append(rng.choice(truth))
            depth = 0 if parent == ROOT else tree.depths[parent] + 1
            if parent == on_path and depth < len(ahead) and rng.random() < 0.85:
                wanted.insert(rng.randrange(len(wanted) + 1), ahead[depth])
            for token in wanted:
                if token not in taken:
                    taken.add(token)
                    nodes.append(Candidate(parent, token))
        return nodes


def _deepest_on(tree: TokenTree, path: Sequence[int]) -> int:
    """The last node of ``tree`` that is on ``path``, or ROOT."""
    node = ROOT
    for token in path:
        below = tree.child(node, token)
        if below is None:
            break
        node = below
    return node


class WatchingVerifier(LmVerifier):
    """The target's verifier; counts what was verified and accepted."""

    def __init__(self, runner: Any) -> None:
        super().__init__(runner)
        self.num_trees = 0
        self.num_branching_trees = 0
        self.num_accepted = 0
        self.num_accepted_late_siblings = 0  # accepted, and not the first child of its parent
        self.num_accepted_deep_late_siblings = 0  # and at depth 2 or more
        self.most_rows = 0

    def verify(self, jobs: Sequence[Job]) -> tuple[list[Decision | SpecdecError], Timings]:
        decisions, timings = super().verify(jobs)
        self.most_rows = max(self.most_rows, timings.rows)
        for job, decision in zip(jobs, decisions, strict=True):
            if isinstance(decision, SpecdecError) or not job.tree:
                continue
            self.num_trees += 1
            self.num_branching_trees += not job.tree.is_chain
            depths = job.tree.depths
            for node in decision.accepted:
                late = job.tree.parents.index(job.tree.parents[node]) < node
                self.num_accepted += 1
                self.num_accepted_late_siblings += late
                self.num_accepted_deep_late_siblings += late and depths[node] >= 2
        return decisions, timings

    def __str__(self) -> str:
        return (
            f"{self.num_trees} trees, {self.num_branching_trees} branching, {self.num_accepted} nodes accepted, "
            f"{self.num_accepted_late_siblings} not their parent's first child, "
            f"{self.num_accepted_deep_late_siblings} of those at depth >= 2, at most {self.most_rows} rows a pass"
        )
