"""Verification of all sequences of a pass: which nodes are accepted, and the token after them.

Knows sampling and verification; does not know the model and its cache. Sequences are grouped by verification method and
each group is one batch. All tokens drawn for a pass leave the device as one array. Nothing is drawn where the
pass has returned the tokens.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.backends.base import Backend
from specdec.core.device import indices
from specdec.core.errors import SpecdecError
from specdec.core.limits import chunked
from specdec.core.noise import Domain, Key, exponentials, uniforms
from specdec.core.sequence import Draw, Method, SequenceSpec
from specdec.core.tree import EMPTY_TREE, SparseDistribution, TokenTree
from specdec.passes.outputs import RowOutputs
from specdec.sampling.distributions import dense_from_sparse, probabilities, race
from specdec.sampling.draft_draws import drawn_as_said
from specdec.sampling.state import NO_TOKEN, SamplingState, or_no_token, rows_of
from specdec.speculation.verification import descend, verify_block, verify_token
from target_service.verifier import Decision


@dataclass(frozen=True, slots=True)
class Case:
    """What is to be decided of a sequence: ``tree`` hangs from the last of ``ids``, which ``sampling`` has taken in."""

    sampling: SamplingState
    ids: Sequence[int]
    tree: TokenTree

    @property
    def spec(self) -> SequenceSpec:
        return self.sampling.spec

    def key(self, num_nodes: int) -> Key:
        """Of the noise after so many nodes of a chain."""
        return Key(self.spec.seed, len(self.ids) + num_nodes, len(self.ids))


def decide(cases: Sequence[Case], outputs: Sequence[RowOutputs], backend: Backend) -> list[Decision | SpecdecError]:
    """Verify each tree against the outputs of the pass for its root and each of its nodes. An error ends that sequence
    only: after its text every token is forbidden. A decision does not depend on the other cases."""
    submitted, cases = cases, _without_false_draws(cases)
    target_tokens: dict[int, Sequence[int]] = {}  # by case that is keyed by token
    for index, case in enumerate(cases):
        if case.sampling.takes_most_likely and (most_likely := outputs[index].most_likely) is not None:
            target_tokens[index] = most_likely
        elif case.sampling.draws_by_logits and (drawn_tokens := outputs[index].drawn) is not None:
            target_tokens[index] = drawn_tokens
    others = [index for index in range(len(cases)) if index not in target_tokens]
    keyed = [index for index in others if cases[index].spec.keyed_by_token]
    chained = [index for index in others if not cases[index].spec.keyed_by_token]
    logits = {index: outputs[index].logits[: 1 + len(cases[index].tree)] for index in others}
    drawn: list[Tensor] = []
    for part in _chunks(keyed, logits, backend.logits_per_call):
        drawn.append(_target_tokens([cases[i] for i in part], [logits[i] for i in part], backend))
    num_accepted: dict[int, int] = {}
    for method in (Method.TOKEN, Method.BLOCK):
        alike = [index for index in chained if cases[index].spec.method is method]
        for part in _chunks(alike, logits, backend.logits_per_call):
            accepted, after = _verify_chains(method, [cases[i] for i in part], [logits[i] for i in part])
            num_accepted.update(zip(part, accepted, strict=True))
            drawn.append(after)
    tokens: list[int] = torch.cat(drawn).tolist() if drawn else []

    start = 0
    for index in keyed:
        end = start + 1 + len(cases[index].tree)
        target_tokens[index], start = tokens[start:end], end
    decisions: dict[int, Decision] = {}
    for index, predictions in target_tokens.items():
        nodes, next_token = descend(cases[index].tree.token_ids, cases[index].tree.parents, predictions)
        decisions[index] = Decision(tuple(nodes), next_token, tuple(predictions))
    for (index, number), next_token in zip(num_accepted.items(), tokens[start:], strict=True):
        refused = cases[index] is not submitted[index]
        decisions[index] = Decision(tuple(range(number)), next_token, refused=refused)
    return [
        case.sampling.no_token if decisions[index].next_token == NO_TOKEN else decisions[index]
        for index, case in enumerate(cases)
    ]


def _without_false_draws(cases: Sequence[Case]) -> list[Case]:
    """The cases. A chain with a token that was not drawn as it says is dropped."""
    trees = [EMPTY_TREE if case.spec.keyed_by_token else case.tree for case in cases]
    honest = drawn_as_said(trees, [case.key(0) for case in cases])
    return [case if ok else dataclasses.replace(case, tree=EMPTY_TREE) for case, ok in zip(cases, honest, strict=True)]


def _chunks(indices: Sequence[int], logits: Mapping[int, Tensor], max_logits: int) -> Iterator[list[int]]:
    """Whole cases, of at most ``max_logits`` logits: float64 takes several times the memory of the model's logits."""
    for part in chunked([logits[index].numel() for index in indices], max_logits):
        yield [indices[number] for number in part]


def _target_tokens(cases: Sequence[Case], logits: Sequence[Tensor], backend: Backend) -> Tensor:  # [rows] int64
    """Greedy and coupled: the tokens that the target draws at every root and node."""
    draws: list[Draw] = []
    for case in cases:
        base = len(case.ids)
        draws += [
            case.sampling.draw(position) for position in (base, *(base + 1 + depth for depth in case.tree.depths))
        ]
    trees = [(case.sampling, case.tree) for case in cases]
    rows = rows_of(logits, trees)
    return or_no_token(backend.draw(rows, draws), rows, trees)


def _verify_chains(method: Method, cases: Sequence[Case], logits: Sequence[Tensor]) -> tuple[list[int], Tensor]:
    """Token or block: how many nodes of each chain are accepted, and the token after them, [cases] int64."""
    num_nodes = [len(case.tree) for case in cases]
    trees = [(case.sampling, case.tree) for case in cases]
    rows = rows_of(logits, trees)
    params = [case.spec.sampling for case in cases for _ in range(1 + len(case.tree))]
    target_probs = probabilities(rows, params).nan_to_num_(0.0)  # [rows, vocab]; 0: every token is forbidden
    keys = [case.key(node) for case in cases for node in range(len(case.tree))]
    accepted, following = (verify_block if method is Method.BLOCK else verify_token)(
        target_probs,
        draft_probs=_draft_probs([case.tree for case in cases], target_probs),
        token_ids=[token for case in cases for token in case.tree.token_ids],
        accept_uniforms=uniforms(keys, Domain.ACCEPT),
        num_nodes=num_nodes,
    )
    after = [case.key(num) for case, num in zip(cases, accepted, strict=True)]
    noise = exponentials(after, Domain.CORRECTION, vocab_size=target_probs.shape[-1], device=target_probs.device)
    starts = itertools.accumulate(num_nodes, lambda start, num: start + 1 + num, initial=0)
    last = indices([start + num for start, num in zip(starts, accepted, strict=False)], rows.device)
    return accepted, or_no_token(race(following.log(), noise), rows[last], trees)


def _draft_probs(trees: Sequence[TokenTree], like: Tensor) -> Tensor:  # [nodes of all trees, vocab] float64
    """The distribution that each node was sampled from; one-hot if the draft was certain."""
    sparse = [
        (tree.draft_probs[node] if tree.draft_probs else None) or SparseDistribution((token,), (1.0,))
        for tree in trees
        for node, token in enumerate(tree.token_ids)
    ]
    return dense_from_sparse(sparse, like.shape[-1], like.device)
