"""An n-gram model as a draft: no torch, no GPU, some microseconds per node. The text so far counts as well.

Under greedy and coupled sampling it ranks by the target's own noise. Under token and block verification it proposes its
most likely token, of which it is certain.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from draft_service.drafter import DraftSequence
from draft_service.drafters.ngram_model import MAX_CONTEXT, NgramModel, TextCounts, scores_after
from specdec.core.errors import SpecdecError
from specdec.core.noise import Domain, Key, exponentials_of
from specdec.core.rounds import AHEAD, CACHE_SALT, SIBLINGS, ModelInfo
from specdec.core.sequence import SequenceSpec
from specdec.core.tree import MAX_CONFIDENCE, Candidate

MIN_SCORE = 0.05
"""Less likely tokens are not proposed."""

_WINDOW = 4096
"""The latest tokens of a text, which are counted."""

_MAX_SCORED = 32
_MIN_MARGIN = 2.0**-8
_CONTEXT_LENGTH = 1 << 24


@dataclass(slots=True)
class _State:
    counts: TextCounts = field(default_factory=TextCounts)
    num_counted: int = 0


_Sequence = DraftSequence[_State]


class NgramDrafter:
    """See draft_service.drafter.Drafter."""

    def __init__(self, model: NgramModel, name: str) -> None:
        self._model = model
        self.info = ModelInfo(
            name=name,
            model_digest=model.digest,
            vocab_size=model.vocab_size,
            tokenizer_fingerprint=model.fingerprint,
            context_length=_CONTEXT_LENGTH,
            dtype="ngram",
            capabilities=(AHEAD, SIBLINGS, CACHE_SALT),
        )

    @staticmethod
    def load(file: Path) -> NgramDrafter:
        """Raises ValueError with a message for the operator."""
        return NgramDrafter(NgramModel.load(file), file.stem)

    def open(self, spec: SequenceSpec) -> _State:
        return _State()

    def close(self, state: _State) -> None: ...

    def request_yield(self, requested: bool) -> None: ...

    def cache_use(self) -> tuple[int, int]:
        return 0, 0

    def learn(self, sequences: Sequence[_Sequence]) -> list[SpecdecError | bool]:
        for sequence in sequences:
            state = sequence.state
            start = max(state.num_counted, len(sequence.ids) - _WINDOW)
            state.counts.take_in(sequence.ids[start:])
            state.num_counted = len(sequence.ids)
        return [True] * len(sequences)

    def grow(self, sequences: Sequence[_Sequence]) -> list[Sequence[Candidate] | SpecdecError | None]:
        self.learn(sequences)
        return [self._branches(sequence) if sequence.branches else self._chain(sequence) for sequence in sequences]

    def _branches(self, sequence: _Sequence) -> list[Candidate]:
        children: list[Candidate] = []
        for parent, count in sequence.branches:
            children += self._children(sequence, parent, sequence.tree.path_ids(parent), count=count)
        return sequence.tree.lacking(children)

    def _chain(self, sequence: _Sequence) -> list[Candidate]:
        """As many nodes as are wanted, each below the first one of the step before. Siblings do not count there."""
        chain: list[Candidate] = []
        last = len(sequence.tree) - 1
        path = sequence.tree.path_ids(last)
        for parent in range(last, last + sequence.num_wanted):
            children = self._children(sequence, parent, path, count=1 + sequence.num_siblings)
            if not children:
                break
            path = (*path, children[0].token_id)
            chain += children
        return chain

    def _children(self, sequence: _Sequence, parent: int, path: Sequence[int], *, count: int) -> list[Candidate]:
        """The most likely children of a node, with the tokens from below the root down to it in ``path``."""
        tail = [*sequence.ids[-MAX_CONTEXT:], *path][-MAX_CONTEXT:]
        scores = scores_after(tail, self._model, sequence.state.counts, count=count)
        likely = sorted(((score, token) for token, score in scores.items() if score >= MIN_SCORE), reverse=True)
        drawn = self._drawn(sequence.spec, likely[:_MAX_SCORED], sequence.base + len(path))
        confidence = _confidence(drawn)
        return [Candidate(parent, token, confidence=confidence) for _, token in drawn[:count]]

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
    margin = max(drawn[0][0] - drawn[1][0], _MIN_MARGIN)
    return min(int(math.log2(margin / _MIN_MARGIN)), MAX_CONFIDENCE - 1) + 1
