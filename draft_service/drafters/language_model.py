"""Draft-Target-Model: a small language model proposes a chain, one token per sequence and pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from draft_service.engine import DraftSequence, Node
from draft_service.proposal import propose
from specdec.errors import Overloaded, SpecdecError
from specdec.kv_cache import PoolFullError, SequenceCache
from specdec.model_runner import ModelRunner
from specdec.packed_attention import Segment
from specdec.prefill import rows_to_feed
from specdec.sampling_state import SamplingState
from specdec.sequence import SequenceSpec


@dataclass(slots=True)
class _Memory:
    cache: SequenceCache
    sampling: SamplingState
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
        return _Memory(self._runner.new_cache(), SamplingState(spec))

    def close(self, memory: _Memory) -> None:
        memory.cache.release()

    def cache_use(self) -> tuple[int, int]:
        return self._runner.pool.num_used, self._runner.pool.num_slots

    def learn(self, sequences: Sequence[DraftSequence]) -> list[SpecdecError | bool]:
        # All but the root: the first step of growing feeds it and reads its logits.
        limit = self.info.context_length
        texts = [sequence.ids[:limit][:-1] or sequence.ids for sequence in sequences]
        return [fed if isinstance(fed, SpecdecError) else fed is not None for fed in self._feed(sequences, texts)]

    def grow(self, sequences: Sequence[DraftSequence]) -> list[Sequence[Node] | SpecdecError | None]:
        texts = [[*sequence.ids, *sequence.tree.token_ids] for sequence in sequences]
        fed = self._feed(sequences, texts)
        logits = {index: outcome for index, outcome in enumerate(fed) if isinstance(outcome, Tensor)}
        nodes = propose([sequences[index] for index in logits], list(logits.values()))
        grown = dict(zip(logits, nodes, strict=True))
        return [[grown[index]] if isinstance(outcome, Tensor) else outcome for index, outcome in enumerate(fed)]

    def _feed(
        self, sequences: Sequence[DraftSequence], texts: Sequence[list[int]]
    ) -> list[Tensor | SpecdecError | None]:
        """Bring each cache towards the end of its text.

        The logits [1, vocab] after it; None: that takes another pass; or why it was impossible.
        """
        for sequence, text in zip(sequences, texts, strict=True):
            memory: _Memory = sequence.memory
            memory.cache.truncate(_common_length(memory.fed, text, len(text) - 1))
            if not len(memory.cache):
                self._runner.move(memory.cache.attach(text))
        caches: list[SequenceCache] = [sequence.memory.cache for sequence in sequences]
        outcome: list[Tensor | SpecdecError | None] = [None] * len(texts)
        segments: dict[int, Segment] = {}
        for index, num_rows in enumerate(rows_to_feed(list(zip(caches, texts, strict=True)))):
            cache, text = caches[index], texts[index]
            num_context = len(cache)
            end = num_context + num_rows
            try:
                cache.take(num_rows)
            except PoolFullError as error:
                outcome[index] = Overloaded(str(error))
                continue
            if num_rows:
                wanted = [num_rows - 1] if end == len(text) else []
                segments[index] = Segment(
                    text[num_context:end], range(-1, num_rows - 1), num_context, cache.block_table, wanted
                )
        outputs = self._runner.forward(list(segments.values())) if segments else []
        for (index, segment), output in zip(segments.items(), outputs, strict=True):
            caches[index].keep(range(len(segment.token_ids)))
            caches[index].remember(sequences[index].ids[: len(texts[index])])  # what is committed, not what is drafted
            sequences[index].memory.fed = texts[index][: len(caches[index])]
            if segment.logit_rows:
                outcome[index] = output.logits
        return outcome


def _common_length(fed: Sequence[int], text: Sequence[int], at_most: int) -> int:
    """How far ``fed`` and ``text`` agree. At most so far, so that something is left to feed."""
    limit = max(0, min(len(fed), at_most))
    if list(fed[:limit]) == list(text[:limit]):
        return limit
    return next(i for i in range(limit) if fed[i] != text[i])
