"""Proposals from a draft's logits, for all sequences of a step at once.

Knows sampling; does not know the model and its cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from draft_service.drafter import DraftSequence, Node
from draft_service.drafters.tree_cache import Guesses
from specdec.core.limits import chunked
from specdec.core.noise import Domain, Key, exponentials_at
from specdec.core.sequence import Draw
from specdec.core.tree import SparseDistribution, TokenTree
from specdec.passes.outputs import RowOutputs
from specdec.sampling.confidence import confidence_of
from specdec.sampling.distributions import probabilities, race, sparse_support
from specdec.sampling.state import NO_TOKEN, SamplingState, or_no_token, rows_of


class Ranking(Protocol):
    """Which tokens follow, of a draft's logits. See specdec.backends.base.Backend."""

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor: ...

    def leaders(self, logits: Tensor, draws: Sequence[Draw], count: int) -> tuple[Tensor, Tensor]: ...


def guess(places: Sequence[tuple[DraftSequence, TokenTree, RowOutputs]], ranking: Ranking) -> list[list[Guesses]]:
    """Greedy and coupled verification: for each row of a sequence the children that it may get, likeliest first.

    The first is the token that the target would draw there if it were this model; the others would be drawn next.
    A sequence comes with a tree below its ids and the outputs of the last rows of the root and the tree's nodes.
    """
    found: dict[int, list[Guesses]] = {}
    for index, (sequence, _, outputs) in enumerate(places):
        if (
            sequence.num_guesses == 1
            and _state(sequence).takes_likeliest
            and (likeliest := outputs.likeliest) is not None
        ):
            found[index] = [Guesses((token,)) for token in likeliest]
    others = [index for index in range(len(places)) if index not in found]
    ranked = _ranked([(*places[index][:2], places[index][2].logits) for index in others], ranking)
    found.update(zip(others, ranked, strict=True))
    return [found[index] for index in range(len(places))]


def _ranked(places: Sequence[tuple[DraftSequence, TokenTree, Tensor]], ranking: Ranking) -> list[list[Guesses]]:
    """Guesses from logits [n, vocab], which are of the last n of the root and the tree's nodes."""
    if not places:
        return []
    states = [(_state(sequence), tree) for sequence, tree, _ in places]
    rows = rows_of([logits for *_, logits in places], states)
    draws: list[Draw] = []
    for sequence, tree, logits in places:
        positions = (sequence.base, *(sequence.base + depth + 1 for depth in tree.depths))
        draws += [_state(sequence).draw(position) for position in positions[len(positions) - len(logits) :]]
    best: list[int] = or_no_token(ranking.draw(rows, draws), rows, states).tolist()
    most = max(sequence.num_guesses for sequence, *_ in places)
    ranked: list[list[int]] = [[] for _ in best]
    confidence = [0] * len(best)
    if most > 1:
        tokens, scores = ranking.leaders(rows, draws, most)
        ranked, confidence = tokens.tolist(), confidence_of(scores).tolist()
    distinct = (
        tuple(dict.fromkeys((first, *others))) if first != NO_TOKEN else ()
        for first, others in zip(best, ranked, strict=True)
    )
    guesses = zip(distinct, confidence, strict=True)
    return [
        [
            Guesses(each[: sequence.num_guesses], confidence)
            for each, confidence in itertools.islice(guesses, len(logits))
        ]
        for sequence, _, logits in places
    ]


def draw(sequences: Sequence[DraftSequence], logits: Sequence[Tensor], logits_per_call: int) -> list[list[Node]]:
    """Token and block verification: draw a node below the last one of each tree from the logits [1, vocab] there.

    The node carries the distribution that it was drawn from. An empty list: the model gives NaN.
    ``sequence.memory.sampling`` is the sequence's SamplingState, which has taken in the ids. A node does not depend on
    the other sequences.
    """
    drawn: list[list[Node]] = []
    # In chunks: float64 takes several times the memory of the model's logits.
    for part in chunked([each.numel() for each in logits], logits_per_call):
        some = sequences[part.start : part.stop]
        places = [(_state(sequence), sequence.tree) for sequence in some]
        drawn += _with_distributions(some, rows_of(logits[part.start : part.stop], places))
    return drawn


def _with_distributions(sequences: Sequence[DraftSequence], rows: Tensor) -> list[list[Node]]:
    probs = probabilities(rows, [s.spec.sampling for s in sequences]).nan_to_num_(0.0)  # [sequences, vocab]
    ids, weights = sparse_support(probs)  # [sequences, m] each
    keys = [Key(s.spec.seed, s.base + len(s.tree), s.base) for s in sequences]
    row = torch.arange(len(sequences), device=ids.device)[:, None].expand_as(ids)
    noise = exponentials_at(keys, row.flatten(), ids.flatten(), Domain.DRAFT).view_as(weights)
    winners = race(weights.log(), noise).tolist()
    nodes = []
    for sequence, winner, row_ids, row_weights in zip(sequences, winners, ids.tolist(), weights.tolist(), strict=True):
        size = sum(weight > 0 for weight in row_weights)
        distribution = SparseDistribution(tuple(row_ids[:size]), tuple(row_weights[:size]))
        nodes.append([Node(len(sequence.tree) - 1, row_ids[winner], distribution)] if size else [])
    return nodes


def _state(sequence: DraftSequence) -> SamplingState:
    state: SamplingState = sequence.memory.sampling
    return state
