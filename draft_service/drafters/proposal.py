"""Candidates from a draft's logits, for all sequences of a step at once. Does not know the model and its cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from draft_service.drafter import Candidates, DraftSequence
from specdec.core.limits import chunked
from specdec.core.noise import Domain, Key, exponentials_at
from specdec.core.sequence import Draw
from specdec.core.tree import SparseDistribution, TokenTree
from specdec.passes.outputs import RowOutputs
from specdec.sampling.confidence import confidence_of
from specdec.sampling.distributions import probabilities, race, sparse_support
from specdec.sampling.state import NO_TOKEN, SamplingState, or_no_token, rows_of


class Ranking(Protocol):
    """Which tokens follow, by a draft's logits. See specdec.backends.base.Backend."""

    def draw(self, logits: Tensor, draws: Sequence[Draw]) -> Tensor: ...

    def leaders(self, logits: Tensor, draws: Sequence[Draw], count: int) -> tuple[Tensor, Tensor]: ...


def rank(inputs: Sequence[tuple[DraftSequence, TokenTree, RowOutputs]], ranking: Ranking) -> list[list[Candidates]]:
    """Greedy and coupled verification: for each row of a sequence the children that it may get, most likely first.

    The first is the token that the target would draw there if it were this model; the others would be drawn next.
    A sequence comes with a tree below its ids and the outputs of the last rows of the root and the tree's nodes.
    """
    candidates: dict[int, list[Candidates]] = {}
    for index, (sequence, _, outputs) in enumerate(inputs):
        state = _state(sequence)
        tokens = outputs.most_likely if state.takes_most_likely else None
        tokens = outputs.drawn if tokens is None and state.draws_by_logits else tokens
        if sequence.num_candidates == 1 and tokens is not None:
            candidates[index] = [Candidates((token,)) for token in tokens]
    others = [index for index in range(len(inputs)) if index not in candidates]
    ranked = _ranked([(*inputs[index][:2], inputs[index][2].logits) for index in others], ranking)
    candidates.update(zip(others, ranked, strict=True))
    return [candidates[index] for index in range(len(inputs))]


def _ranked(inputs: Sequence[tuple[DraftSequence, TokenTree, Tensor]], ranking: Ranking) -> list[list[Candidates]]:
    """Candidates from logits [n, vocab], which are of the last n of the root and the tree's nodes."""
    if not inputs:
        return []
    states = [(_state(sequence), tree) for sequence, tree, _ in inputs]
    rows = rows_of([logits for *_, logits in inputs], states)
    draws: list[Draw] = []
    for sequence, tree, logits in inputs:
        positions = (sequence.base, *(sequence.base + depth + 1 for depth in tree.depths))
        draws += [_state(sequence).draw(position) for position in positions[len(positions) - len(logits) :]]
    best: list[int] = or_no_token(ranking.draw(rows, draws), rows, states).tolist()
    count = max(sequence.num_candidates for sequence, *_ in inputs)
    leaders: list[list[int]] = [[] for _ in best]
    confidence = [0] * len(best)
    if count > 1:
        tokens, scores = ranking.leaders(rows, draws, count)
        leaders, confidence = tokens.tolist(), confidence_of(scores).tolist()
    distinct = (
        tuple(dict.fromkeys((first, *others))) if first != NO_TOKEN else ()
        for first, others in zip(best, leaders, strict=True)
    )
    by_row = zip(distinct, confidence, strict=True)
    return [
        [Candidates(ids[: sequence.num_candidates], bucket) for ids, bucket in itertools.islice(by_row, len(logits))]
        for sequence, _, logits in inputs
    ]


def draw(sequences: Sequence[DraftSequence], logits: Sequence[Tensor], logits_per_call: int) -> list[Candidates]:
    """Token and block verification: the token drawn below the last node of each tree from the logits [1, vocab] there.

    It comes with the distribution that it was drawn from. Empty: the model gives NaN. A token does not depend on the
    other sequences.
    """
    drawn: list[Candidates] = []
    # In chunks: float64 takes several times the memory of the model's logits.
    for part in chunked([rows.numel() for rows in logits], logits_per_call):
        chunk = sequences[part.start : part.stop]
        states = [(_state(sequence), sequence.tree) for sequence in chunk]
        drawn += _with_distributions(chunk, rows_of(logits[part.start : part.stop], states))
    return drawn


def _with_distributions(sequences: Sequence[DraftSequence], rows: Tensor) -> list[Candidates]:
    probs = probabilities(rows, [s.spec.sampling for s in sequences]).nan_to_num_(0.0)  # [sequences, vocab]
    ids, weights = sparse_support(probs)  # [sequences, m] each
    keys = [Key(s.spec.seed, s.base + len(s.tree), s.base) for s in sequences]
    row = torch.arange(len(sequences), device=ids.device)[:, None].expand_as(ids)
    noise = exponentials_at(keys, row.flatten(), ids.flatten(), Domain.DRAFT).view_as(weights)
    winners = race(weights.log(), noise).tolist()
    drawn = []
    for winner, row_ids, row_weights in zip(winners, ids.tolist(), weights.tolist(), strict=True):
        size = sum(weight > 0 for weight in row_weights)
        distribution = SparseDistribution(tuple(row_ids[:size]), tuple(row_weights[:size]))
        drawn.append(Candidates((row_ids[winner],), draft_probs=distribution) if size else Candidates())
    return drawn


def _state(sequence: DraftSequence) -> SamplingState:
    """It has taken in the ids."""
    state: SamplingState = sequence.state.sampling
    return state
