"""The next token of each chain that grows, for all sequences of a step at once.

Knows sampling; refuses to know the model and its cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from draft_service.drafter import DraftSequence, Node
from specdec.noise import Domain, Key, exponentials_at
from specdec.portions import NUMBERS_AT_ONCE, portions
from specdec.sampling import probabilities, race, sparse_support
from specdec.sampling_state import SamplingState, choose, rank, rows_of
from specdec.tree import SparseDistribution


def propose(sequences: Sequence[DraftSequence], logits: Sequence[Tensor]) -> list[list[Node]]:
    """The node below the last one of each sequence's tree, by its logits [1, vocab], and the siblings it is to have.

    ``sequence.memory.sampling`` is its SamplingState, which has taken in its ids. A node does not depend on the other
    sequences.
    """
    proposed: dict[int, list[Node]] = {}
    for keyed, propose_all in ((True, _keyed), (False, _with_distributions)):
        some = [i for i, sequence in enumerate(sequences) if sequence.spec.keyed_by_token is keyed]
        # A few at a time: float64 takes several times the memory of what the model gives.
        for part in portions([logits[i].numel() for i in some], NUMBERS_AT_ONCE):
            indices = some[part.start : part.stop]
            those = [sequences[i] for i in indices]
            places = [(_state(sequence), sequence.tree) for sequence in those]
            nodes = propose_all(those, rows_of([logits[i] for i in indices], places))
            proposed.update(zip(indices, nodes, strict=True))
    return [proposed[index] for index in range(len(sequences))]


def propose_children(sequences: Sequence[DraftSequence], logits: Sequence[Tensor]) -> list[list[Node]]:
    """The children that each sequence's spots lack, by logits [n, vocab] of the spots; greedy and coupled only.

    Of a sequence with penalties or the like, they are of the root and all nodes instead.
    """
    rows: list[Tensor] = []
    places: list[tuple[SamplingState, int]] = []
    for sequence, of_sequence in zip(sequences, logits, strict=True):
        state, tree = _state(sequence), sequence.tree
        of_all = rows_of([of_sequence], [(state, tree)])
        rows.append(of_all[[spot.parent + 1 for spot in sequence.spots]] if state.transforms.active else of_all)
        depths = (-1, *tree.depths)
        places += [(state, sequence.base + depths[spot.parent + 1] + 1) for spot in sequence.spots]
    together = torch.cat(rows)  # [spots of all, vocab]
    best: list[int] = choose(together, places).tolist()
    most = max(spot.num_children for sequence in sequences for spot in sequence.spots)
    ranked: list[list[int]] = rank(together, places, most).tolist() if most > 1 else [[] for _ in best]
    candidates = iter(zip(best, ranked, strict=True))
    return [_missing(sequence, [next(candidates) for _ in sequence.spots]) for sequence in sequences]


def _missing(sequence: DraftSequence, candidates: Sequence[tuple[int, list[int]]]) -> list[Node]:
    """Of each spot's likeliest children those that the tree lacks. First comes what this model would draw itself."""
    there = set(zip(sequence.tree.parents, sequence.tree.token_ids, strict=True))
    nodes = []
    for spot, (best, ranked) in zip(sequence.spots, candidates, strict=True):
        wanted = list(dict.fromkeys((best, *ranked)))[: spot.num_children]
        nodes += [Node(spot.parent, token) for token in wanted if (spot.parent, token) not in there]
    return nodes


def _keyed(sequences: Sequence[DraftSequence], rows: Tensor) -> list[list[Node]]:
    """Greedy and coupled: what the target would draw if it were this model, and what it would draw next."""
    places = [(_state(sequence), sequence.base + len(sequence.tree)) for sequence in sequences]
    tokens: list[int] = choose(rows, places).tolist()
    most = max(sequence.num_siblings for sequence in sequences)
    ranked: list[list[int]] = rank(rows, places, 1 + most).tolist() if most else [[] for _ in tokens]
    nodes = []
    for sequence, token, runners_up in zip(sequences, tokens, ranked, strict=True):
        wanted = list(dict.fromkeys((token, *runners_up)))[: 1 + sequence.num_siblings]
        nodes.append([Node(len(sequence.tree) - 1, each) for each in wanted])
    return nodes


def _with_distributions(sequences: Sequence[DraftSequence], rows: Tensor) -> list[list[Node]]:
    """Token and block: a draw of the draft's own, and what it was drawn from; none where the model gives no numbers."""
    probs = probabilities(rows, [s.spec.sampling for s in sequences]).nan_to_num_(0.0)  # [sequences, vocab]
    ids, weights = sparse_support(probs)  # [sequences, m] each
    keys = [Key(s.spec.seed, s.base + len(s.tree), s.base) for s in sequences]
    row = ids.new_tensor(range(len(sequences)))[:, None].expand_as(ids)
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
