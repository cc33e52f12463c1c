"""Draft-Target-Model: a small language model proposes a chain, one token per sequence and pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from draft_service.engine import DraftSequence, Node
from specdec.errors import Overloaded, SpecdecError
from specdec.kv_cache import PoolFullError, SequenceCache
from specdec.model_runner import ModelRunner, Segment
from specdec.noise import Domain, exponentials_at
from specdec.noise_cache import CoupledNoise
from specdec.sampling import probabilities, race, sample_coupled, sparse_support
from specdec.sequence import SequenceSpec
from specdec.tree import SparseDistribution


@dataclass(slots=True)
class _Memory:
    cache: SequenceCache
    noise: CoupledNoise
    fed: list[int] = field(default_factory=list)  # the token at each cached position


class LanguageModelDrafter:
    """See draft_service.engine.Drafter.

    Rolling back to what was committed and catching up on what was missed are one rule: keep the cache as far as
    it agrees with the text at hand, feed the rest.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.info = runner.info

    def open(self, spec: SequenceSpec) -> _Memory:
        noise = CoupledNoise(spec.seed, self.info.vocab_size, self._runner.device)
        return _Memory(self._runner.new_cache(), noise)

    def close(self, memory: _Memory) -> None:
        memory.cache.release()

    def cache_use(self) -> tuple[int, int]:
        return self._runner.pool.num_used, self._runner.pool.num_slots

    def learn(self, sequences: Sequence[DraftSequence]) -> list[SpecdecError | None]:
        # All but the root: the first step of growing feeds it and reads its logits.
        limit = self.info.context_length
        texts = [sequence.ids[:limit][:-1] or sequence.ids for sequence in sequences]
        fed = self._feed(sequences, texts)
        return [outcome if isinstance(outcome, SpecdecError) else None for outcome in fed]

    def grow(self, sequences: Sequence[DraftSequence]) -> list[Sequence[Node] | SpecdecError]:
        texts = [[*sequence.ids, *sequence.tree.token_ids] for sequence in sequences]
        grown: list[Sequence[Node] | SpecdecError] = []
        for sequence, outcome in zip(sequences, self._feed(sequences, texts), strict=True):
            grown.append(outcome if isinstance(outcome, SpecdecError) else [_next_node(sequence, outcome)])
        return grown

    def _feed(self, sequences: Sequence[DraftSequence], texts: Sequence[list[int]]) -> list[Tensor | SpecdecError]:
        """Bring each cache to the end of its text. The logits [1, vocab] after it, or why it was impossible."""
        outcome: dict[int, Tensor | SpecdecError] = {}
        segments: dict[int, Segment] = {}
        for index, (sequence, text) in enumerate(zip(sequences, texts, strict=True)):
            memory: _Memory = sequence.memory
            agreed = _common_length(memory.fed, text, len(text) - 1)
            memory.cache.truncate(agreed)
            behind = text[agreed:]
            try:
                slots = memory.cache.take(len(behind))
            except PoolFullError as error:
                outcome[index] = Overloaded(str(error))
                continue
            context = memory.cache.slots[:agreed]
            last = len(behind) - 1
            segments[index] = Segment(behind, range(-1, last), context, slots, [last] if behind else [])
        logits = self._runner.forward(list(segments.values())) if segments else []
        for index, row in zip(segments, logits, strict=True):
            memory = sequences[index].memory
            memory.cache.keep(range(len(segments[index].token_ids)))
            memory.fed = texts[index]
            outcome[index] = row
        return [outcome[index] for index in range(len(sequences))]


def _common_length(fed: Sequence[int], text: Sequence[int], at_most: int) -> int:
    """How far ``fed`` and ``text`` agree. At most so far, so that something is left to feed."""
    limit = max(0, min(len(fed), at_most))
    if list(fed[:limit]) == list(text[:limit]):
        return limit
    return next(i for i in range(limit) if fed[i] != text[i])


def _next_node(sequence: DraftSequence, logits: Tensor) -> Node:
    """The token after the chain, by logits [1, vocab]."""
    spec = sequence.spec
    parent = len(sequence.tree) - 1
    position = sequence.base + len(sequence.tree)
    if spec.keyed_by_token:
        noise = None if spec.sampling.greedy else sequence.memory.noise.rows([position], sequence.base)
        return Node(parent, int(sample_coupled(logits, spec.sampling, noise)))
    ids, weights = sparse_support(probabilities(logits, spec.sampling)[0])
    noise = exponentials_at(spec.seed, position, sequence.base, Domain.DRAFT, ids)
    token_id = int(ids[race(weights.log()[None], noise[None])])
    return Node(parent, token_id, SparseDistribution(tuple(ids.tolist()), tuple(weights.tolist())))
