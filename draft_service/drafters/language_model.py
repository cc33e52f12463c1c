"""A small language model as the drafter: it proposes a chain, one or several tokens per call.

Ahead of the verdict it proposes a tree. Each node is fed once.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from draft_service.drafter import DraftSequence, Node, Spot
from draft_service.drafters.proposal import Ranking, draw, guess
from draft_service.drafters.tree_cache import TreeCache
from specdec.core.errors import Overloaded, SpecdecError
from specdec.core.limits import MAX_TREE_ROWS
from specdec.core.one_by_one import one_by_one
from specdec.core.rounds import AHEAD, CACHE_SALT, SIBLINGS
from specdec.core.sequence import Draw, SequenceSpec
from specdec.core.tree import EMPTY_TREE, ROOT
from specdec.kvcache.block_pool import Move, PoolFullError, SequenceCache
from specdec.passes.outputs import RowOutputs
from specdec.passes.prefill import fair_share, rows_to_feed
from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner
from specdec.sampling.grammar import Compiled, Grammars, wait_for_any
from specdec.sampling.state import SamplingState

_MAX_FURTHER_ROWS = 64
"""Further rows after a pass, of all sequences together: a large budget must not decide about memory or time."""


@dataclass(slots=True)
class _Memory:
    cache: TreeCache
    spec: SequenceSpec
    grammar: Future[Compiled] | None
    sampling: SamplingState | None = None  # None: the grammar is not compiled yet
    num_guesses: int = 0  # per cached row, at least


_Place = tuple[DraftSequence, Sequence[Spot], RowOutputs | None, bool]
"""A sequence, where it grows, the outputs of its rows in a pass, and whether all rows are there."""


class LanguageModelDrafter:
    """See draft_service.drafter.Drafter.

    One rule covers both rollback and catch-up: the cached rows that agree with the present text and tree stay, and
    the rest is fed.
    """

    def __init__(self, runner: ModelRunner, grammars: Grammars | None = None, ranking: Ranking | None = None) -> None:
        """Without ``grammars`` it proposes what a grammar forbids as well. ``ranking``: in place of the backend's."""
        self._runner, self._grammars, self._ranking = runner, grammars, ranking or runner.backend
        self._caches: set[TreeCache] = set()  # of open sequences
        self.info = dataclasses.replace(
            runner.info, capabilities=(*runner.info.capabilities, AHEAD, SIBLINGS, CACHE_SALT)
        )

    def open(self, spec: SequenceSpec) -> _Memory:
        grammar = self._grammars.start(spec.sampling.grammar, spec.cache_salt) if self._grammars is not None else None
        memory = _Memory(TreeCache(self._runner.new_cache(spec.cache_salt)), spec, grammar)
        if grammar is None:
            memory.sampling = SamplingState(spec)
        self._caches.add(memory.cache)
        return memory

    def close(self, memory: _Memory) -> None:
        memory.cache.text.release()
        self._caches.discard(memory.cache)

    def request_yield(self, requested: bool) -> None:
        self._runner.request_yield(requested)

    def cache_use(self) -> tuple[int, int]:
        return self._runner.pool.num_used, self._runner.pool.num_slots

    def learn(self, sequences: Sequence[DraftSequence]) -> list[SpecdecError | bool]:
        # All ids but the root: the first step of growing feeds the root and reads its logits.
        ends = [min(sequence.base, self.info.context_length) - 1 for sequence in sequences]
        return self._feed(sequences, ends, [()] * len(ends))[0]

    def grow(self, sequences: Sequence[DraftSequence]) -> list[Sequence[Node] | SpecdecError | None]:
        outcomes = self._take_in(sequences)
        ready = [index for index, outcome in enumerate(outcomes) if outcome is True]
        grown = self._grow([sequences[index] for index in ready]) if ready else []
        nodes = dict(zip(ready, grown, strict=True))
        return [nodes[index] if outcome is True else outcome or None for index, outcome in enumerate(outcomes)]

    def _take_in(self, sequences: Sequence[DraftSequence]) -> list[SpecdecError | bool]:
        """Count the ids of each sequence. False: its grammar is not compiled yet."""
        compiling = [sequence.memory.grammar for sequence in sequences if sequence.memory.sampling is None]
        if len(compiling) == len(sequences):
            wait_for_any(compiling)
        outcomes: list[SpecdecError | bool] = []
        for sequence in sequences:
            memory: _Memory = sequence.memory
            try:
                if memory.sampling is None and memory.grammar is not None and memory.grammar.done():
                    memory.sampling = SamplingState(memory.spec, memory.grammar.result().mask())
            except SpecdecError as error:
                outcomes.append(error)
            else:
                outcomes.append(memory.sampling is not None and (memory.sampling.take_in(sequence.ids) or True))
        return outcomes

    def _grow(self, sequences: Sequence[DraftSequence]) -> list[Sequence[Node] | SpecdecError | None]:
        spots = [each.spots or (Spot(len(each.tree) - 1, 1 + each.num_siblings),) for each in sequences]
        done, read = self._feed(sequences, [sequence.base for sequence in sequences], spots)
        places = {
            index: (sequences[index], spots[index], read.get(index), outcome is True)
            for index, outcome in enumerate(done)
            if outcome is True or index in read
        }
        proposed = dict(zip(places, one_by_one(self._propose, list(places.values())), strict=True))
        errors = [outcome if isinstance(outcome, SpecdecError) else None for outcome in done]
        return [proposed.get(index, error) for index, error in enumerate(errors)]

    def _propose(self, places: Sequence[_Place]) -> list[Sequence[Node] | None]:
        """Store the guesses after the rows that were read. Returns the nodes of the sequences that are ready."""
        read = [(sequence, outputs) for sequence, _, outputs, _ in places if outputs is not None]
        self._guess(read)
        drawn = [
            (sequence, outputs) for sequence, _, outputs, ready in places if ready and not sequence.spec.keyed_by_token
        ]
        logits = [outputs.logits[-1:] for _, outputs in drawn if outputs is not None]
        nodes = iter(draw([sequence for sequence, _ in drawn], logits, self._runner.backend.logits_per_call))
        found: list[Sequence[Node] | None] = []
        for sequence, spots, _, ready in places:
            if not ready:
                found.append(None)
            elif not sequence.spec.keyed_by_token:
                found.append(next(nodes))
            else:
                found.append(_children(sequence, spots) if sequence.spots else _chain(sequence))
        return found

    def _guess(self, read: Sequence[tuple[DraftSequence, RowOutputs]]) -> None:
        """Store the guesses after the fed rows, also if rows of the same sequence are still to be fed."""
        places = [(each, each.memory.cache.tree, outputs) for each, outputs in read if each.spec.keyed_by_token]
        for (sequence, *_), guesses in zip(places, guess(places, self._ranking), strict=True):
            sequence.memory.cache.learn(guesses)
            sequence.memory.num_guesses = min(sequence.memory.num_guesses, sequence.num_guesses)

    def _feed(
        self, sequences: Sequence[DraftSequence], ends: Sequence[int], spots: Sequence[Sequence[Spot]]
    ) -> tuple[list[SpecdecError | bool], dict[int, RowOutputs]]:
        """Feed each text up to its end in ``ends``, and then the tree's nodes down to its ``spots``.

        Returns, per sequence, whether all of that is cached (False: it takes another pass) or the error; and by index
        the outputs of the root and nodes that were fed.
        """
        caches: list[TreeCache] = [sequence.memory.cache for sequence in sequences]
        self._follow(sequences, spots)
        counts = self._num_to_feed(sequences, ends)
        stops = [len(cache.text) + counts.get(index, 0) for index, cache in enumerate(caches)]
        done: list[SpecdecError | bool] = [stop >= end for stop, end in zip(stops, ends, strict=True)]
        lacking = {
            index: caches[index].lacking((spot.parent for spot in spots[index]), sequence.tree)
            for index, sequence in enumerate(sequences)
            if stops[index] == sequence.base
        }
        most = fair_share([len(nodes) for nodes in lacking.values()], MAX_TREE_ROWS)
        rows: dict[int, tuple[Sequence[int], list[int]]] = {}  # ids and nodes
        for index, (cache, sequence) in enumerate(zip(caches, sequences, strict=True)):
            ids: Sequence[int] = sequence.ids[len(cache.text) : stops[index]]
            nodes = lacking.get(index, [])
            if len(nodes) > most:
                nodes, done[index] = nodes[:most], False
            if ids or nodes:
                rows[index] = ids, nodes
        goes_on = len(rows) == len(sequences) and all(spots) and all(outcome is True for outcome in done)
        num_further = self._num_further(sequences, sum(map(len, itertools.chain(*rows.values())))) if goes_on else 0
        segments: dict[int, Segment] = {}
        for index, (ids, nodes) in rows.items():
            sequence, reads_end = sequences[index], bool(ids) and index in lacking
            try:
                if not sequence.spots:
                    self._make_room(caches, len(ids) + len(nodes))
                draw = _next_draw(sequence) if num_further else None
                segments[index] = caches[index].segment(ids, reads_end, nodes, sequence.tree, num_further, draw)
            except PoolFullError as error:
                done[index] = Overloaded(str(error))
        outputs = self._runner.forward(list(segments.values())) if segments else []
        read = {}
        for (index, segment), output in zip(segments.items(), outputs, strict=True):
            caches[index].fed(counts.get(index, 0), output.further)
            caches[index].text.remember(sequences[index].ids)  # committed ids only, no drafts
            if segment.logit_rows:
                read[index] = output
        return done, read

    def _follow(self, sequences: Sequence[DraftSequence], spots: Sequence[Sequence[Spot]]) -> None:
        moves: list[Move] = []
        for sequence, wanted in zip(sequences, spots, strict=True):
            memory: _Memory = sequence.memory
            if sequence.num_guesses > memory.num_guesses:
                memory.cache.forget_guesses()
                memory.num_guesses = sequence.num_guesses
            # Without spots the tree's rows are not needed, and their memory is released.
            tree = sequence.tree if wanted else EMPTY_TREE
            moves += memory.cache.follow(sequence.ids, tree, any(spot.parent == ROOT for spot in wanted))
        self._runner.move(moves)

    def _num_further(self, sequences: Sequence[DraftSequence], num_rows: int) -> int:
        """How many further rows each sequence may have below its last node, beside the ``num_rows`` of the pass. 0
        unless every sequence grows a drawn chain: the token of a further row is then known from the draw alone."""
        if not self._runner.goes_on or not all(map(_is_drawn_chain, sequences)):
            return 0
        pool, num = self._runner.pool, len(sequences)
        room = (pool.num_free_blocks - num) * pool.block_size - num_rows  # each sequence may begin a block
        most = min(sequence.num_wanted for sequence in sequences) - 1
        return max(0, min(most, _MAX_FURTHER_ROWS // num, room // num))

    def _make_room(self, needed: Sequence[TreeCache], num_rows: int) -> None:
        """Free memory for ``num_rows`` rows of the ``needed`` caches: the trees of all other sequences are dropped."""
        pool = self._runner.pool
        if pool.num_free_blocks * pool.block_size < num_rows:
            for other in self._caches.difference(needed):
                other.drop_tree()

    def _num_to_feed(self, sequences: Sequence[DraftSequence], ends: Sequence[int]) -> dict[int, int]:
        """By index, how many ids to feed in this pass, for each sequence with a text that does not reach its end."""
        texts: dict[int, tuple[SequenceCache, Sequence[int]]] = {}
        for index, (sequence, end) in enumerate(zip(sequences, ends, strict=True)):
            cache: SequenceCache = sequence.memory.cache.text
            if len(cache) < end:
                ids = sequence.ids if end == sequence.base else sequence.ids[:end]
                if end - len(cache) > 1:  # also blocks that another sequence filled while this one waited for them
                    self._runner.move(cache.attach(ids))
                texts[index] = cache, ids
        return dict(zip(texts, rows_to_feed(list(texts.values()), self._runner.chunk.rows), strict=True))


def _children(sequence: DraftSequence, spots: Sequence[Spot]) -> list[Node]:
    """The children at ``spots`` that the tree lacks."""
    there = set(zip(sequence.tree.parents, sequence.tree.token_ids, strict=True))
    cache: TreeCache = sequence.memory.cache
    nodes = []
    for spot in spots:
        guesses = cache.guesses(spot.parent)
        nodes += [
            Node(spot.parent, token, confidence=guesses.confidence)
            for token in guesses.token_ids[: spot.num_children]
            if (spot.parent, token) not in there
        ]
    return nodes


def _is_drawn_chain(sequence: DraftSequence) -> bool:
    state: SamplingState = sequence.memory.sampling
    return state.draws_by_logits and not sequence.spots


def _next_draw(sequence: DraftSequence) -> Draw:
    """The draw of the token below the last node."""
    state: SamplingState = sequence.memory.sampling
    return state.draw(sequence.base + (1 + sequence.tree.depths[-1] if sequence.tree else 0))


def _chain(sequence: DraftSequence) -> list[Node]:
    """The chain below the last node as far as the guesses are known, each node followed by its siblings."""
    cache: TreeCache = sequence.memory.cache
    nodes: list[Node] = []
    known = cache.guesses_down(len(sequence.tree) - 1)
    for parent, guesses in enumerate(itertools.islice(known, sequence.num_wanted), len(sequence.tree) - 1):
        children = guesses.token_ids[: 1 + sequence.num_siblings]
        nodes += [Node(parent, token, confidence=guesses.confidence) for token in children]
    return nodes
