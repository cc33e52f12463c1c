"""An n-gram model as a draft: no torch, no GPU, some microseconds per node. The text so far counts as well.

Under greedy and coupled sampling it ranks by the target's own noise. Under token and block verification it proposes its
likeliest token, of which it is certain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draft_service.drafter import DraftSequence, Node, Spot
from draft_service.drafters.ngram_model import MOST_CONTEXT, NgramModel, OwnText, ranked
from specdec.core.errors import SpecdecError
from specdec.core.noise import Domain, Key, exponentials_of
from specdec.core.rounds import AHEAD, CACHE_SALT, SIBLINGS, ModelInfo
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import MAX_CONFIDENCE

LEAST_SCORE = 0.05
"""Less likely tokens are not proposed."""

_WINDOW = 4096
"""The latest tokens of a text, which are counted."""

_MOST_SCORED = 32
_LEAST_MARGIN = 2.0**-8
_CONTEXT_LENGTH = 1 << 24


@dataclass(slots=True)
class _Memory:
    own: OwnText = field(default_factory=OwnText)
    num_counted: int = 0


class NgramDrafter:
    """See draft_service.drafter.Drafter."""

    def __init__(self, model: NgramModel, name: str) -> None:
        self._model = model
        capabilities = (AHEAD, SIBLINGS, CACHE_SALT)
        self.info = ModelInfo(
            name,
            model.digest,
            model.vocab_size,
            model.fingerprint,
            _CONTEXT_LENGTH,
            dtype="ngram",
            capabilities=capabilities,
        )

    @staticmethod
    def load(file: Path) -> NgramDrafter:
        """Raises ValueError with a message for the operator."""
        return NgramDrafter(NgramModel.load(file), file.stem)

    def open(self, spec: SequenceSpec) -> _Memory:
        return _Memory()

    def close(self, memory: _Memory) -> None: ...

    def request_yield(self, requested: bool) -> None: ...

    def cache_use(self) -> tuple[int, int]:
        return 0, 0

    def learn(self, sequences: Sequence[DraftSequence]) -> list[SpecdecError | bool]:
        for sequence in sequences:
            memory: _Memory = sequence.memory
            start = max(memory.num_counted, len(sequence.ids) - _WINDOW)
            memory.own.take_in(sequence.ids[start:])
            memory.num_counted = len(sequence.ids)
        return [True] * len(sequences)

    def grow(self, sequences: Sequence[DraftSequence]) -> list[Sequence[Node] | SpecdecError | None]:
        self.learn(sequences)
        return [self._at_spots(each) if each.spots else self._chain(each) for each in sequences]

    def _at_spots(self, sequence: DraftSequence) -> list[Node]:
        found: list[Node] = []
        for spot in sequence.spots:
            path = self._path(sequence, spot.parent)
            found += self._children(sequence, spot, path)
        there = set(zip(sequence.tree.parents, sequence.tree.token_ids, strict=True))
        return [node for node in found if (node.parent, node.token_id) not in there]

    def _chain(self, sequence: DraftSequence) -> list[Node]:
        """As many nodes as are wanted, each below the first one of the step before. Siblings do not count there."""
        nodes: list[Node] = []
        last = len(sequence.tree) - 1
        path = self._path(sequence, last)
        for parent in range(last, last + sequence.num_wanted):
            new = self._children(sequence, Spot(parent, 1 + sequence.num_siblings), path)
            if not new:
                break
            path.append(new[0].token_id)
            nodes += new
        return nodes

    def _path(self, sequence: DraftSequence, parent: int) -> list[int]:
        """The tokens from below the root down to a node."""
        return [sequence.tree.token_ids[node] for node in sequence.tree.path(parent)]

    def _children(self, sequence: DraftSequence, spot: Spot, path: Sequence[int]) -> list[Node]:
        tail = [*sequence.ids[-MOST_CONTEXT:], *path][-MOST_CONTEXT:]
        scores = ranked(self._model, sequence.memory.own, tail, spot.num_children)
        likely = sorted(((score, token) for token, score in scores.items() if score >= LEAST_SCORE), reverse=True)
        drawn = self._drawn(sequence.spec, likely[:_MOST_SCORED], sequence.base + len(path))
        confidence = _confidence(drawn)
        return [Node(spot.parent, token, confidence=confidence) for _, token in drawn[: spot.num_children]]

    def _drawn(self, spec: SequenceSpec, likely: list[tuple[float, int]], position: int) -> list[tuple[float, int]]:
        """In the order in which the target draws them, if its distribution is this one."""
        scores = [math.log(score) for score, _ in likely]
        tokens = [token for _, token in likely]
        if spec.keyed_by_token and not spec.sampling.greedy:
            noise = exponentials_of(Key(spec.seed, position), Domain.COUPLED, tokens)
            scores = [s / spec.sampling.temperature - math.log(e) for s, e in zip(scores, noise, strict=True)]
        return sorted(zip(scores, tokens, strict=True), reverse=True)


def _confidence(drawn: list[tuple[float, int]]) -> int:
    """See specdec.sampling.confidence, without torch."""
    if len(drawn) < 2:
        return MAX_CONFIDENCE
    margin = max(drawn[0][0] - drawn[1][0], _LEAST_MARGIN)
    return min(int(math.log2(margin / _LEAST_MARGIN)), MAX_CONFIDENCE - 1) + 1
