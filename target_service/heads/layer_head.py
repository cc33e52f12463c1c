"""A head with a layer of its own, as a head of self-drafts: its rows are in the target's pool.

The head's keys and values are one more layer of the pool: row r of a text is in the slot of its position, so shared
blocks, moves, replays and preemptions need nothing of their own. The last row of a text and those of a tree take slots
behind the text for the time of the drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.backends.taps import Taps
from specdec.core.tree import ROOT
from specdec.kvcache.block_pool import PoolFullError, SequenceCache
from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner
from target_service.heads.recurrent import RecurrentHead
from target_service.self_draft.ranking import guesses
from target_service.self_draft.trees import NUM_CHILDREN, Growing, Guesses, Passed, SelfDraftState

_MOST_PENDING = 64
"""States that wait for the next drafting, at most about. They are computed together, so that a head that does not pay
costs little in each pass."""


@dataclass(slots=True)
class LayerMemory:
    """``num_rows`` rows are in the pool. ``states``, [n, hidden_size] each, are those of the next rows, ``taps`` what
    the target computed for those after them, [n, taps * hidden_size] each."""

    num_rows: int = 0
    states: list[Tensor] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)

    @property
    def next_row(self) -> int:
        return self.num_rows + sum(map(len, self.states)) + sum(map(len, self.taps))


class LayerHead:
    """See target_service.self_draft.trees.Head. ``layer``: the number of the head's layer in the pool."""

    def __init__(self, network: RecurrentHead, taps: Taps, runner: ModelRunner, layer: int) -> None:
        self.network, self.kind, self.taps = network, network.kind, taps
        self._runner, self._layer = runner, layer

    def open(self, salt: bytes) -> LayerMemory:
        return LayerMemory()

    def num_rows(self, memory: SelfDraftState) -> int:
        found: LayerMemory = memory.of_head
        return found.num_rows

    def learn(self, passed: Passed) -> None:
        """What was found in the cache has the head's rows as well, but no states."""
        memory: LayerMemory = passed.memory.of_head
        assert passed.taps is not None
        if memory.next_row != passed.start + 1:
            memory.num_rows, memory.taps = passed.start, []
            memory.states = [passed.taps.new_zeros(1, self.network.hidden_size)]
        memory.taps.append(passed.taps)
        if memory.next_row - memory.num_rows > _MOST_PENDING:
            self._extend([(memory, passed.cache, passed.ids, min(len(passed.cache), len(passed.ids)))])

    def begin(self, growing: Sequence[Growing]) -> list[Growing]:
        able = [each for each in growing if each.memory.of_head.next_row == len(each.ids) == len(each.cache) + 1]
        able = [each for each in able if _takes(each)]
        if able:
            last = self._extend([(each.memory.of_head, each.cache, each.ids, len(each.ids)) for each in able])
            for each, state in zip(able, last, strict=True):
                each.states[ROOT] = state
        return able

    def guess(self, places: Sequence[tuple[Growing, int]]) -> list[Guesses]:
        if lacking := [(each, node) for each, node in places if node not in each.states]:
            self._feed(lacking)
        logits = self.network.logits(torch.stack([each.states[node] for each, node in places]))
        draws = [each.sampling.draw(each.position(node)) for each, node in places]
        return guesses(logits, self.network.ids, draws, NUM_CHILDREN)

    def end(self, growing: Sequence[Growing]) -> None:
        for each in growing:
            each.cache.keep(())

    def _extend(self, texts: Sequence[tuple[LayerMemory, SequenceCache, Sequence[int], int]]) -> list[Tensor]:
        """Compute the rows of each text that lack, up to the given number. Returns the output of each last one. Those
        beyond the cached text are computed again the next time."""
        segments, states = [], []
        for memory, cache, ids, end in texts:
            new = [self.network.fused(torch.cat(memory.taps))] if memory.taps else []
            own, memory.taps = torch.cat([*memory.states, *new]), []
            num = end - memory.num_rows
            segments.append(_chain(ids[memory.num_rows : end], memory.num_rows, cache.block_table))
            states.append(own[:num])
            kept = min(end, len(cache))
            memory.states = [own[kept - memory.num_rows :]]
            memory.num_rows = kept
        found = self._pass(segments, torch.cat(states))
        ends = torch.tensor([len(segment.token_ids) for segment in segments]).cumsum(0) - 1
        return list(found[ends.to(found.device)])

    def _feed(self, nodes: Sequence[tuple[Growing, int]]) -> None:
        """Compute the rows of nodes; their parents have rows already."""
        by_sequence: dict[int, list[int]] = {}
        each_of = {id(each): each for each, _ in nodes}
        for each, node in nodes:
            by_sequence.setdefault(id(each), []).append(node)
        segments, states = [], []
        for key, new in by_sequence.items():
            each = each_of[key]
            rows = [node for node in each.states if node != ROOT] + new
            row_of = {node: row for row, node in enumerate(rows)}
            parents = [row_of.get(each.tree.parents[node], ROOT) for node in rows]
            tokens = [each.tree.token_ids[node] for node in new]
            segments.append(Segment(tokens, parents, len(each.ids), each.cache.block_table, (), exact=False))
            states += [each.states[each.tree.parents[node]] for node in new]
        found = iter(self._pass(segments, torch.stack(states)))
        for key, new in by_sequence.items():
            each_of[key].states.update({node: next(found) for node in new})

    def _pass(self, segments: Sequence[Segment], states: Tensor) -> Tensor:
        packed_pass = self._runner.packed_pass(segments)
        tokens = [token for segment in segments for token in segment.token_ids]
        return self.network.rows(tokens, states, packed_pass.rows.positions, packed_pass, self._layer)


def _takes(each: Growing) -> bool:
    """Take slots for the last row of the text and for the tree. False: there are none."""
    try:
        each.cache.take(1 + each.max_nodes)
    except PoolFullError:
        return False
    return True


def _chain(token_ids: Sequence[int], num_context: int, block_table: Sequence[int]) -> Segment:
    return Segment(token_ids, range(-1, len(token_ids) - 1), num_context, block_table, (), exact=False)
