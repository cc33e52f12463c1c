"""Draft-Target-Model: a small language model proposes a chain, one token per sequence and pass.

Ahead of the verdict it proposes a tree, whose nodes are fed once each.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from torch import Tensor

from draft_service.drafter import DraftSequence, Node, Spot
from draft_service.drafters.tree_cache import TreeCache
from draft_service.proposal import draw, guess
from specdec.errors import Overloaded, SpecdecError
from specdec.kv_cache import Move, PoolFullError, SequenceCache
from specdec.model_runner import ModelRunner
from specdec.noise_cache import KeptRows
from specdec.packed_rows import Segment
from specdec.prefill import rows_to_feed
from specdec.rounds import AHEAD, CACHE_SALT, SIBLINGS
from specdec.sampling_state import SamplingState
from specdec.sequence import SequenceSpec
from specdec.tree import ROOT, TokenTree

_Rows = tuple[Sequence[int], bool, Sequence[int], TokenTree]
"""What TreeCache.segment takes."""


@dataclass(slots=True)
class _Memory:
    cache: TreeCache
    sampling: SamplingState


class LanguageModelDrafter:
    """See draft_service.drafter.Drafter.

    Rolling back to what was committed and catching up on what was missed are one rule: keep what is cached as far as
    it agrees with the text and the tree at hand, feed the rest.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._noise = KeptRows()
        self._caches: WeakSet[TreeCache] = WeakSet()
        self.info = dataclasses.replace(
            runner.info, capabilities=(*runner.info.capabilities, AHEAD, SIBLINGS, CACHE_SALT)
        )

    def open(self, spec: SequenceSpec) -> _Memory:
        cache = TreeCache(self._runner.new_cache(spec.cache_salt))
        self._caches.add(cache)
        return _Memory(cache, SamplingState(spec, kept=self._noise))

    def close(self, memory: _Memory) -> None:
        memory.cache.text.release()
        self._caches.discard(memory.cache)

    def cache_use(self) -> tuple[int, int]:
        return self._runner.pool.num_used, self._runner.pool.num_slots

    def learn(self, sequences: Sequence[DraftSequence]) -> list[SpecdecError | bool]:
        # All but the root: the first step of growing feeds it and reads its logits.
        ends = [min(sequence.base, self.info.context_length) - 1 for sequence in sequences]
        return self._feed(sequences, ends, [()] * len(ends))[0]

    def grow(self, sequences: Sequence[DraftSequence]) -> list[Sequence[Node] | SpecdecError | None]:
        spots = [each.spots or (Spot(len(each.tree) - 1, 1 + each.num_siblings),) for each in sequences]
        done, logits = self._feed(sequences, [sequence.base for sequence in sequences], spots)
        for index, sequence in enumerate(sequences):
            if done[index] is True:
                done[index] = sequence.memory.sampling.take_in(sequence.ids) or True
        ready = {index: sequences[index] for index, outcome in enumerate(done) if outcome is True}
        keyed = {index: sequence for index, sequence in ready.items() if sequence.spec.keyed_by_token}
        read = [index for index in keyed if index in logits]
        guessed = guess([(keyed[index], keyed[index].memory.cache.tree, logits[index]) for index in read])
        for index, guesses in zip(read, guessed, strict=True):
            keyed[index].memory.cache.learn(guesses)
        nodes = {index: _children(sequence, spots[index]) for index, sequence in keyed.items()}
        drawn = [index for index in ready if index not in keyed]
        drawings = draw([ready[index] for index in drawn], [logits[index][-1:] for index in drawn])
        nodes.update(zip(drawn, drawings, strict=True))
        return [nodes[index] if outcome is True else outcome or None for index, outcome in enumerate(done)]

    def _feed(
        self, sequences: Sequence[DraftSequence], ends: Sequence[int], spots: Sequence[Sequence[Spot]]
    ) -> tuple[list[SpecdecError | bool], dict[int, Tensor]]:
        """Bring each text towards its end, and there the tree to its spots.

        Whether the end was reached (False: that takes another pass), or why it was impossible; and of those who were
        fed there the logits [rows, vocab] of the last rows of root and nodes.
        """
        caches: list[TreeCache] = [sequence.memory.cache for sequence in sequences]
        moves: list[Move] = []
        for cache, sequence, wanted in zip(caches, sequences, spots, strict=True):
            moves += cache.follow(sequence.ids, sequence.tree, any(spot.parent == ROOT for spot in wanted))
        self._runner.move(moves)
        counts = self._num_to_feed(sequences, ends)
        done: list[SpecdecError | bool] = []
        segments: dict[int, Segment] = {}
        for index, (cache, sequence, end) in enumerate(zip(caches, sequences, ends, strict=True)):
            start = len(cache.text)
            stop = start + counts.get(index, 0)
            complete = stop == sequence.base
            nodes = cache.lacking((spot.parent for spot in spots[index]), sequence.tree) if complete else []
            done.append(stop >= end)
            if stop == start and not nodes:
                continue
            rows = sequence.ids[start:stop], complete and stop > start, nodes, sequence.tree
            try:
                segments[index] = self._segment(cache, rows, None if sequence.spots else caches)
            except PoolFullError as error:
                done[index] = Overloaded(str(error))
        outputs = self._runner.forward(list(segments.values())) if segments else []
        logits = {}
        for (index, segment), output in zip(segments.items(), outputs, strict=True):
            caches[index].fed(counts.get(index, 0))
            caches[index].text.remember(sequences[index].ids)  # what is committed, not what is drafted
            if segment.logit_rows:
                logits[index] = output.logits
        return done, logits

    def _num_to_feed(self, sequences: Sequence[DraftSequence], ends: Sequence[int]) -> dict[int, int]:
        """Ids of those whose text does not reach its end."""
        texts: dict[int, tuple[SequenceCache, Sequence[int]]] = {}
        for index, (sequence, end) in enumerate(zip(sequences, ends, strict=True)):
            cache: SequenceCache = sequence.memory.cache.text
            if len(cache) < end:
                ids = sequence.ids if end == sequence.base else sequence.ids[:end]
                if end - len(cache) > 1:  # also what another sequence filled while this one waited for it
                    self._runner.move(cache.attach(ids))
                texts[index] = cache, ids
        return dict(zip(texts, rows_to_feed(list(texts.values())), strict=True))

    def _segment(self, cache: TreeCache, rows: _Rows, needed: Sequence[TreeCache] | None) -> Segment:
        """Somebody waits for it, unless ``needed`` is None: then all trees give way but those of the ``needed``."""
        try:
            return cache.segment(*rows)
        except PoolFullError:
            if needed is None:
                raise
            for other in self._caches.difference(needed):
                other.drop_tree()
            return cache.segment(*rows)


def _children(sequence: DraftSequence, spots: Sequence[Spot]) -> list[Node]:
    """Those that the tree lacks."""
    there = set(zip(sequence.tree.parents, sequence.tree.token_ids, strict=True))
    cache: TreeCache = sequence.memory.cache
    return [
        Node(spot.parent, token)
        for spot in spots
        for token in cache.guesses(spot.parent)[: spot.num_children]
        if (spot.parent, token) not in there
    ]
