"""Own trees: what a target drafts with its head, for all sequences of a pass at once.

The head's keys and values are one more layer of the target's pool: row r of a text is in the slot of its position, so
shared blocks, moves, replays and preemptions need nothing of their own. The last row of a text and those of a tree take
slots behind the text for the time of the drafting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specdec.backends.taps import Taps
from specdec.core.device import indices, numbers
from specdec.core.noise import Domain, Key, exponentials_at
from specdec.core.sequence import Draw
from specdec.core.tree import EMPTY_TREE, ROOT, TokenTree
from specdec.kvcache.block_pool import PoolFullError, SequenceCache
from specdec.passes.rows import Segment
from specdec.runner.model_runner import ModelRunner
from specdec.sampling.confidence import confidence_of
from specdec.sampling.state import SamplingState
from specdec.speculation.acceptance import PRIOR, AcceptanceModel
from specdec.speculation.tree_growth import Frontier
from target_service.heads.recurrent import RecurrentHead

_POSSIBLE = 256
"""Tokens of a row that get noise. One behind them hardly ever wins."""

_MOST_PENDING = 64
"""States that wait for the next drafting, at most about. They are computed together, so that a head that does not pay
costs little in each pass."""

NUM_CHILDREN = len(PRIOR)
"""Children of a node at most."""

_PASS_ROWS = 1.0
"""A pass of the head costs hardly more than its rows, so a tree grows at its likeliest places one after the other."""


@dataclass(slots=True)
class HeadMemory:
    """What the head knows of one sequence: ``num_rows`` rows are in the pool, ``states`` are those of the next rows,
    [n, hidden_size] each, and ``taps`` what the target computed for those after them, [n, taps * hidden_size] each."""

    chances: AcceptanceModel
    num_rows: int = 0
    states: list[Tensor] = field(default_factory=list)
    taps: list[Tensor] = field(default_factory=list)
    tree: TokenTree = EMPTY_TREE  # the last own tree, which is being verified

    @property
    def next_row(self) -> int:
        return self.num_rows + sum(map(len, self.states)) + sum(map(len, self.taps))


@dataclass(slots=True)
class Growing:
    """The drafting of one sequence. Its text ``ids`` is cached but for the last id."""

    memory: HeadMemory
    cache: SequenceCache
    sampling: SamplingState
    ids: Sequence[int]
    max_nodes: int
    tree: TokenTree = EMPTY_TREE
    guesses: dict[int, tuple[tuple[int, ...], int]] = field(default_factory=dict)  # by node: children, confidence
    rows: list[int] = field(default_factory=list)  # the nodes that were fed, in this order
    outputs: list[Tensor] = field(default_factory=list)  # by row, from the root on: [hidden_size]


class OwnTrees:
    """``layer``: the number of the head's layer in the pool."""

    def __init__(self, head: RecurrentHead, taps: Taps, runner: ModelRunner, layer: int) -> None:
        self.head, self.taps = head, taps
        self._runner, self._layer = runner, layer
        self._chances = AcceptanceModel()

    def open(self) -> HeadMemory:
        return HeadMemory(AcceptanceModel(self._chances))

    def learn(self, memory: HeadMemory, cache: SequenceCache, ids: Sequence[int], start: int, taps: Tensor) -> None:
        """Take in the target's states [n, taps * hidden_size] of the positions from ``start`` on. Their keys and
        values are in ``cache`` now. What was found in the cache has the head's rows as well, but no states."""
        if memory.next_row != start + 1:
            memory.num_rows, memory.states, memory.taps = start, [taps.new_zeros(1, self.head.hidden_size)], []
        memory.taps.append(taps)
        if memory.next_row - memory.num_rows > _MOST_PENDING:
            self._extend([(memory, cache, ids, min(len(cache), len(ids)))])

    def observe(self, memory: HeadMemory, accepted: Sequence[int]) -> None:
        """The verdict on the last own tree."""
        memory.chances.observe(memory.tree, accepted, ended=True)
        memory.tree = EMPTY_TREE

    @torch.inference_mode()
    def grow(self, growing: Sequence[Growing]) -> list[TokenTree]:
        """A tree for each sequence, the same whatever the company; empty where there is no memory for its rows."""
        able = [each for each in growing if each.memory.next_row == len(each.ids) == len(each.cache) + 1]
        able = [each for each in able if _takes(each)]
        if able:
            last = self._extend([(each.memory, each.cache, each.ids, len(each.ids)) for each in able])
            for each, state in zip(able, last, strict=True):
                each.outputs.append(state)
            self._guess([(each, ROOT) for each in able])
            frontiers = [Frontier(each.memory.chances.at_confidence, each.tree, each.max_nodes) for each in able]
            while self._add_level(able, frontiers):
                pass
        for each in able:
            each.cache.keep(())
            each.memory.tree = each.tree
        return [each.tree for each in growing]

    def _add_level(self, growing: Sequence[Growing], frontiers: Sequence[Frontier]) -> bool:
        """Add the next children to each tree, after feeding their parents. False: all trees are complete."""
        wanted: list[list[tuple[int, int]]] = []
        lacking: list[tuple[Growing, int]] = []
        for each, frontier in zip(growing, frontiers, strict=True):
            opens = frontier.take(each.max_nodes - len(each.tree), _PASS_ROWS)
            wanted.append([(found.parent, found.rank) for found in opens])
            parents = dict.fromkeys(found.parent for found in opens)
            lacking += [(each, parent) for parent in parents if parent not in each.guesses]
        if lacking:
            self._feed(lacking)
            self._guess(lacking)
        for each, frontier, children_wanted in zip(growing, frontiers, wanted, strict=True):
            new = []
            for parent, rank in children_wanted:
                children, confidence = each.guesses[parent]
                if rank < len(children):
                    new.append((children[rank], parent, None, confidence))
            if new:
                each.tree = each.tree.extended(new)
                frontier.grow(each.tree)
        return any(wanted)

    def _extend(self, texts: Sequence[tuple[HeadMemory, SequenceCache, Sequence[int], int]]) -> list[Tensor]:
        """Compute the rows of each text that lack, up to the given number. Returns the output of each last one. Those
        beyond the cached text are computed again the next time."""
        segments, states = [], []
        for memory, cache, ids, end in texts:
            new = [self.head.fused(torch.cat(memory.taps))] if memory.taps else []
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
            each.rows += new
            row_of = {node: row for row, node in enumerate(each.rows)}
            above = [each.tree.parents[node] for node in each.rows]
            parents = [ROOT if parent == ROOT else row_of[parent] for parent in above]
            tokens = [each.tree.token_ids[node] for node in new]
            segments.append(Segment(tokens, parents, len(each.ids), each.cache.block_table, (), exact=False))
            states += [each.outputs[1 + parents[row_of[node]]] for node in new]
        found = iter(self._pass(segments, torch.stack(states)))
        for key, new in by_sequence.items():
            each_of[key].outputs += [next(found) for _ in new]

    def _pass(self, segments: Sequence[Segment], states: Tensor) -> Tensor:
        packed_pass = self._runner.packed_pass(segments)
        tokens = [token for segment in segments for token in segment.token_ids]
        return self.head.rows(tokens, states, packed_pass.rows.positions, packed_pass, self._layer)

    def _guess(self, places: Sequence[tuple[Growing, int]]) -> None:
        """Rank the children of nodes that were fed, likeliest first: by log q plus the target's own noise."""
        states, draws = [], []
        for each, node in places:
            states.append(each.outputs[0 if node == ROOT else 1 + each.rows.index(node)])
            depth = -1 if node == ROOT else each.tree.depths[node]
            draws.append(each.sampling.draw(len(each.ids) + 1 + depth))
        tokens, scores = ranked(self.head.logits(torch.stack(states)), self.head.ids, draws, NUM_CHILDREN)
        # Copied from the device once each, for all rows.
        listed = zip(tokens.tolist(), scores[:, 0].isfinite().tolist(), confidence_of(scores).tolist(), strict=True)
        for (each, node), (children, sound, confidence) in zip(places, listed, strict=True):
            each.guesses[node] = (tuple(children) if sound else (), confidence)


def ranked(logits: Tensor, ids: Tensor, draws: Sequence[Draw], count: int) -> tuple[Tensor, Tensor]:
    """The likeliest tokens after each row of logits [rows, draft vocabulary], and their scores: [rows, count]. ``ids``
    are the target's. A row with NaN has a score of NaN."""
    best = logits.double().topk(min(_POSSIBLE, logits.shape[-1]), -1)
    scores, tokens = best.values, ids[best.indices]
    drawn = [row for row, draw in enumerate(draws) if not draw.sampling.greedy]
    if drawn:
        rows = indices(drawn, logits.device)
        temperatures = numbers([draws[row].sampling.temperature for row in drawn], logits.device)[:, None]
        keys = [Key(draws[row].seed, draws[row].position) for row in drawn]
        places = torch.arange(len(drawn), device=logits.device)[:, None].expand(-1, tokens.shape[1])
        noise = exponentials_at(keys, places.flatten(), tokens[rows].flatten(), Domain.COUPLED).view_as(places)
        scores[rows] = scores[rows] / temperatures - noise.log()
    first = scores.topk(min(count, scores.shape[-1]), -1)
    return tokens.gather(-1, first.indices), first.values


def _takes(each: Growing) -> bool:
    """Take slots for the last row of the text and for the tree. False: there are none."""
    try:
        each.cache.take(1 + each.max_nodes)
    except PoolFullError:
        return False
    return True


def _chain(token_ids: Sequence[int], num_context: int, block_table: Sequence[int]) -> Segment:
    return Segment(token_ids, range(-1, len(token_ids) - 1), num_context, block_table, (), exact=False)
