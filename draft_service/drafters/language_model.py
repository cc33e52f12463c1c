"""A small language model as the drafter: it proposes a chain, one or several tokens per call.

Ahead of the verdict it proposes a tree. Each node is fed once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from draft_service.drafter import Branch, DraftSequence
from draft_service.drafters.proposal import Ranking, draw, rank
from draft_service.drafters.tree_cache import TreeCache
from specdec.core.errors import Overloaded, SpecdecError
from specdec.core.limits import MAX_TREE_ROWS
from specdec.core.one_by_one import one_by_one
from specdec.core.rounds import AHEAD, CACHE_SALT, SIBLINGS
from specdec.core.sequence import Draw, SequenceSpec
from specdec.core.tree import EMPTY_TREE, ROOT, Candidate
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
class LmState:
    """``sampling`` is None while the ``grammar`` is not compiled. Each cached row has ``num_candidates`` at least."""

    cache: TreeCache
    spec: SequenceSpec
    grammar: Future[Compiled] | None
    sampling: SamplingState | None = None
    num_candidates: int = 0


_Sequence = DraftSequence[LmState]

_Fed = tuple[_Sequence, RowOutputs | None, bool]
"""A sequence, the outputs of its rows in a pass, and whether all rows are there."""


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

    def open(self, spec: SequenceSpec) -> LmState:
        grammar = self._grammars.start(spec.sampling.grammar, spec.cache_salt) if self._grammars is not None else None
        state = LmState(TreeCache(self._runner.new_cache(spec.cache_salt)), spec, grammar)
        if grammar is None:
            state.sampling = SamplingState(spec)
        self._caches.add(state.cache)
        return state

    def close(self, state: LmState) -> None:
        state.cache.text.release()
        self._caches.discard(state.cache)

    def request_yield(self, requested: bool) -> None:
        self._runner.request_yield(requested)

    def cache_use(self) -> tuple[int, int]:
        return self._runner.pool.num_used, self._runner.pool.num_slots

    def learn(self, sequences: Sequence[_Sequence]) -> list[SpecdecError | bool]:
        # All ids but the root: the first step of growing feeds the root and reads its logits.
        ends = [min(sequence.base, self.info.context_length) - 1 for sequence in sequences]
        return self._feed(sequences, ends, [()] * len(ends))[0]

    def grow(self, sequences: Sequence[_Sequence]) -> list[Sequence[Candidate] | SpecdecError | None]:
        outcomes = self._take_in(sequences)
        ready = [index for index, outcome in enumerate(outcomes) if outcome is True]
        grown = self._grow([sequences[index] for index in ready]) if ready else []
        candidates = dict(zip(ready, grown, strict=True))
        return [candidates[index] if outcome is True else outcome or None for index, outcome in enumerate(outcomes)]

    def _take_in(self, sequences: Sequence[_Sequence]) -> list[SpecdecError | bool]:
        """Count the ids of each sequence. False: its grammar is not compiled yet."""
        grammars = [sequence.state.grammar for sequence in sequences if sequence.state.sampling is None]
        if len(grammars) == len(sequences):
            wait_for_any([grammar for grammar in grammars if grammar is not None])
        outcomes: list[SpecdecError | bool] = []
        for sequence in sequences:
            state = sequence.state
            try:
                if state.sampling is None and state.grammar is not None and state.grammar.done():
                    state.sampling = SamplingState(state.spec, state.grammar.result().mask())
            except SpecdecError as error:
                outcomes.append(error)
            else:
                outcomes.append(state.sampling is not None and (state.sampling.take_in(sequence.ids) or True))
        return outcomes

    def _grow(self, sequences: Sequence[_Sequence]) -> list[Sequence[Candidate] | SpecdecError | None]:
        branches = [sequence.next_branches for sequence in sequences]
        done, read = self._feed(sequences, [sequence.base for sequence in sequences], branches)
        fed = {
            index: (sequences[index], read.get(index), outcome is True)
            for index, outcome in enumerate(done)
            if outcome is True or index in read
        }
        proposed = dict(zip(fed, one_by_one(self._propose, list(fed.values())), strict=True))
        errors = [outcome if isinstance(outcome, SpecdecError) else None for outcome in done]
        return [proposed.get(index, error) for index, error in enumerate(errors)]

    def _propose(self, fed: Sequence[_Fed]) -> list[Sequence[Candidate] | None]:
        """Store the candidates after the rows that were read. Returns those of the sequences that are ready."""
        self._rank([(sequence, outputs) for sequence, outputs, _ in fed if outputs is not None])
        drawing = [
            (sequence, outputs.logits[-1:])
            for sequence, outputs, ready in fed
            if ready and not sequence.spec.keyed_by_token and outputs is not None
        ]
        logits = [rows for _, rows in drawing]
        drawn = iter(draw([sequence for sequence, _ in drawing], logits, self._runner.backend.logits_per_call))
        proposed: list[Sequence[Candidate] | None] = []
        for sequence, _, ready in fed:
            if not ready:
                proposed.append(None)
            elif not sequence.spec.keyed_by_token:
                proposed.append(next(drawn).below(len(sequence.tree) - 1, 1))
            else:
                proposed.append(_children(sequence) if sequence.branches else _chain(sequence))
        return proposed

    def _rank(self, read: Sequence[tuple[_Sequence, RowOutputs]]) -> None:
        """Store the candidates after the fed rows, also if rows of the same sequence are still to be fed."""
        inputs = [
            (sequence, sequence.state.cache.tree, outputs) for sequence, outputs in read if sequence.spec.keyed_by_token
        ]
        for (sequence, *_), candidates in zip(inputs, rank(inputs, self._ranking), strict=True):
            state = sequence.state
            state.cache.learn(candidates)
            state.num_candidates = min(state.num_candidates, sequence.num_candidates)

    def _feed(
        self, sequences: Sequence[_Sequence], ends: Sequence[int], branches: Sequence[Sequence[Branch]]
    ) -> tuple[list[SpecdecError | bool], dict[int, RowOutputs]]:
        """Feed each text up to its end in ``ends``, and then the tree's nodes down to its ``branches``.

        Returns, per sequence, whether all of that is cached (False: it takes another pass) or the error; and by index
        the outputs of the root and nodes that were fed.
        """
        caches = [sequence.state.cache for sequence in sequences]
        self._follow(sequences, branches)
        counts = self._num_to_feed(sequences, ends)
        stops = [len(cache.text) + counts.get(index, 0) for index, cache in enumerate(caches)]
        done: list[SpecdecError | bool] = [stop >= end for stop, end in zip(stops, ends, strict=True)]
        lacking = {
            index: caches[index].lacking((branch.parent for branch in branches[index]), sequence.tree)
            for index, sequence in enumerate(sequences)
            if stops[index] == sequence.base
        }
        max_nodes = fair_share([len(nodes) for nodes in lacking.values()], MAX_TREE_ROWS)
        rows: dict[int, tuple[Sequence[int], list[int]]] = {}  # ids and nodes
        for index, (cache, sequence) in enumerate(zip(caches, sequences, strict=True)):
            ids: Sequence[int] = sequence.ids[len(cache.text) : stops[index]]
            nodes = lacking.get(index, [])
            if len(nodes) > max_nodes:
                nodes, done[index] = nodes[:max_nodes], False
            if ids or nodes:
                rows[index] = ids, nodes
        all_grow = len(rows) == len(sequences) and all(branches) and all(outcome is True for outcome in done)
        num_rows = sum(len(ids) + len(nodes) for ids, nodes in rows.values())
        num_further = self._num_further(sequences, num_rows) if all_grow else 0
        segments: dict[int, Segment] = {}
        for index, (ids, nodes) in rows.items():
            sequence, reads_end = sequences[index], bool(ids) and index in lacking
            try:
                if not sequence.branches:
                    self._make_room(caches, len(ids) + len(nodes))
                segments[index] = caches[index].segment(
                    ids, nodes, sequence.tree, reads_end=reads_end, num_further=num_further, draw=self._draw(sequence)
                )
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

    def _draw(self, sequence: _Sequence) -> Draw | None:
        """The draw below the last node, if the model's own logits decide it."""
        sampling = sequence.state.sampling
        if sampling is None or not sampling.draws_by_logits:
            return None
        return sampling.draw(sequence.base + (1 + sequence.tree.depths[-1] if sequence.tree else 0))

    def _follow(self, sequences: Sequence[_Sequence], branches: Sequence[Sequence[Branch]]) -> None:
        moves: list[Move] = []
        for sequence, wanted in zip(sequences, branches, strict=True):
            state = sequence.state
            if sequence.num_candidates > state.num_candidates:
                state.cache.forget_candidates()
                state.num_candidates = sequence.num_candidates
            # Without branches the tree's rows are not needed, and their memory is released.
            tree = sequence.tree if wanted else EMPTY_TREE
            moves += state.cache.follow(sequence.ids, tree, any(branch.parent == ROOT for branch in wanted))
        self._runner.move(moves)

    def _num_further(self, sequences: Sequence[_Sequence], num_rows: int) -> int:
        """How many further rows each sequence may have below its last node, after the ``num_rows`` of the pass. 0
        unless every sequence grows a drawn chain: the token of a further row is then known from the draw alone."""
        if not self._runner.decodes_further or not all(map(_is_drawn_chain, sequences)):
            return 0
        pool, num = self._runner.pool, len(sequences)
        room = (pool.num_free_blocks - num) * pool.block_size - num_rows  # each sequence may begin a block
        num_wanted = min(sequence.num_wanted for sequence in sequences) - 1
        return max(0, min(num_wanted, _MAX_FURTHER_ROWS // num, room // num))

    def _make_room(self, needed: Sequence[TreeCache], num_rows: int) -> None:
        """Free memory for ``num_rows`` rows of the ``needed`` caches: the trees of all other sequences are dropped."""
        pool = self._runner.pool
        if pool.num_free_blocks * pool.block_size < num_rows:
            for other in self._caches.difference(needed):
                other.drop_tree()

    def _num_to_feed(self, sequences: Sequence[_Sequence], ends: Sequence[int]) -> dict[int, int]:
        """By index, how many ids to feed in this pass, for each sequence with a text that does not reach its end."""
        texts: dict[int, tuple[SequenceCache, Sequence[int]]] = {}
        for index, (sequence, end) in enumerate(zip(sequences, ends, strict=True)):
            cache = sequence.state.cache.text
            if len(cache) < end:
                ids = sequence.ids if end == sequence.base else sequence.ids[:end]
                if end - len(cache) > 1:  # also blocks that another sequence filled while this one waited for them
                    self._runner.move(cache.attach(ids))
                texts[index] = cache, ids
        return dict(zip(texts, rows_to_feed(list(texts.values()), self._runner.chunk.rows), strict=True))


def _children(sequence: _Sequence) -> list[Candidate]:
    """The children at the branches that the tree lacks."""
    cache = sequence.state.cache
    children = [cache.candidates(parent).below(parent, count) for parent, count in sequence.branches]
    return sequence.tree.lacking([child for siblings in children for child in siblings])


def _is_drawn_chain(sequence: _Sequence) -> bool:
    return _sampling(sequence).draws_by_logits and not sequence.branches


def _sampling(sequence: _Sequence) -> SamplingState:
    assert sequence.state.sampling is not None, "the grammar is compiled"
    return sequence.state.sampling


def _chain(sequence: _Sequence) -> list[Candidate]:
    """The chain below the last node while candidates are known, each node followed by its siblings."""
    chain: list[Candidate] = []
    last = len(sequence.tree) - 1
    known = sequence.state.cache.candidates_down(last)
    for parent, candidates in zip(range(last, last + sequence.num_wanted), known, strict=False):
        chain += candidates.below(parent, 1 + sequence.num_siblings)
    return chain
