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
from target_service.self_draft.ranking import ranked_candidates
from target_service.self_draft.trees import Candidates, GrowingDraft, Parent, Passed

_MAX_PENDING = 64
"""States that wait for the next drafting, at most about. They are computed together, so that a head that does not pay
costs little in each pass."""


@dataclass(slots=True)
class LayerState:
    """``num_rows`` rows are in the pool. ``states``, [n, hidden_size] each, are those of the next rows, ``taps`` what
    the target computed for those after them, [n, taps * hidden_size] each."""

    num_rows: int = 0
    states: list[Tensor] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)

    @property
    def next_row(self) -> int:
        return self.num_rows + sum(map(len, self.states)) + sum(map(len, self.taps))


_Draft = GrowingDraft[LayerState]


class LayerHead:
    """See target_service.self_draft.trees.Head. ``layer``: the number of the head's layer in the pool."""

    def __init__(self, network: RecurrentHead, taps: Taps, runner: ModelRunner, *, layer: int) -> None:
        self.network, self.kind, self.taps = network, network.kind, taps
        self._runner, self._layer = runner, layer

    def open(self, salt: bytes) -> LayerState:
        return LayerState()

    def num_rows(self, state: LayerState) -> int:
        return state.num_rows

    def learn(self, state: LayerState, passed: Passed) -> None:
        """Text that was in the cache has the head's rows there as well, but no states."""
        assert passed.taps is not None
        if state.next_row != passed.start + 1:
            state.num_rows, state.taps = passed.start, []
            state.states = [passed.taps.new_zeros(1, self.network.hidden_size)]
        state.taps.append(passed.taps)
        if state.next_row - state.num_rows > _MAX_PENDING:
            self._extend([(state, passed.cache, passed.ids[: len(passed.cache)])])

    def begin(self, drafts: Sequence[_Draft]) -> list[_Draft]:
        able = [draft for draft in drafts if _is_complete(draft) and _takes_slots(draft)]
        if able:
            last = self._extend([(draft.state, draft.request.cache, draft.request.ids) for draft in able])
            for draft, state in zip(able, last, strict=True):
                draft.states[ROOT] = state
        return able

    def candidates(self, parents: Sequence[Parent[LayerState]]) -> list[Candidates]:
        if lacking := [parent for parent in parents if parent.node not in parent.draft.states]:
            self._feed(lacking)
        logits = self.network.logits(torch.stack([draft.states[node] for draft, node in parents]))
        draws = [parent.draw for parent in parents]
        return ranked_candidates(logits, self.network.ids, draws, rank=self._runner.backend.leaders)

    def end(self, drafts: Sequence[_Draft]) -> None:
        for draft in drafts:
            draft.request.cache.keep(())

    def _extend(self, texts: Sequence[tuple[LayerState, SequenceCache, Sequence[int]]]) -> list[Tensor]:
        """Compute the rows of each text that lack. Returns the output of each last one. Those beyond the cached text
        are computed again the next time."""
        segments, states = [], []
        for state, cache, ids in texts:
            fused = [self.network.fused(torch.cat(state.taps))] if state.taps else []
            pending, state.taps = torch.cat([*state.states, *fused]), []
            segments.append(Segment.chain(ids[state.num_rows :], state.num_rows, cache.block_table, exact=False))
            states.append(pending[: len(ids) - state.num_rows])
            kept = min(len(ids), len(cache))
            state.states = [pending[kept - state.num_rows :]]
            state.num_rows = kept
        outputs = self._pass(segments, torch.cat(states))
        ends = torch.tensor([len(segment.token_ids) for segment in segments]).cumsum(0) - 1
        return list(outputs[ends.to(outputs.device)])

    def _feed(self, parents: Sequence[Parent[LayerState]]) -> None:
        """Compute the rows of nodes; the nodes above have rows already."""
        drafts = {id(parent.draft): parent.draft for parent in parents}
        nodes: dict[int, list[int]] = {key: [] for key in drafts}
        for draft, node in parents:
            nodes[id(draft)].append(node)
        segments, states = [], []
        for key, draft in drafts.items():
            rows = [node for node in draft.states if node != ROOT] + nodes[key]
            row_of = {node: row for row, node in enumerate(rows)}
            above = draft.tree.parents
            tokens = [draft.tree.token_ids[node] for node in nodes[key]]
            parents_of_rows = [row_of.get(above[node], ROOT) for node in rows]
            table = draft.request.cache.block_table
            segments.append(
                Segment(tokens, parents_of_rows, len(draft.request.ids), block_table=table, logit_rows=(), exact=False)
            )
            states += [draft.states[above[node]] for node in nodes[key]]
        outputs = iter(self._pass(segments, torch.stack(states)))
        for key, draft in drafts.items():
            draft.states.update({node: next(outputs) for node in nodes[key]})

    def _pass(self, segments: Sequence[Segment], states: Tensor) -> Tensor:
        packed_pass = self._runner.packed_pass(segments)
        tokens = [token for segment in segments for token in segment.token_ids]
        return self.network.rows(tokens, states, packed_pass, layer=self._layer)


def _is_complete(draft: _Draft) -> bool:
    """Whether all text but the root is cached, with states for all rows of the head."""
    return draft.state.next_row == len(draft.request.ids) == len(draft.request.cache) + 1


def _takes_slots(draft: _Draft) -> bool:
    """Take slots for the last row of the text and for the tree. False: there are none."""
    try:
        draft.request.cache.take(1 + draft.request.max_nodes)
    except PoolFullError:
        return False
    return True
