"""Verification: which draft tokens are accepted, and the distribution of the next token. Does not know their source.

K draft tokens x_1..x_K come with K draft rows and K + 1 target rows. Row i is the distribution after
x_1..x_i, so row i - 1 scores x_i, and target row K follows the last draft token. *Accepted* are
x_1..x_n. After them the caller draws one token from the returned distribution: the *correction*
if n < K, the *bonus* if n == K. So each call yields 1 to K + 1 tokens, and all of them follow the target's
distribution.

One call verifies many chains, with their rows one after the other, so that the device is waited for once or twice in
all. The result of a chain does not depend on the others, on a CPU to the last bit. The draft rows must be the
distributions that the tokens were drawn from. The accept uniforms must be keyed by base as well as position: block
verification reads uniforms beyond the token at which it stops, and the next round must not use them again. Under
coupled and greedy sampling the target draws its own tokens, and `descend` suffices.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from specdec.core.device import indices, numbers

_Item = TypeVar("_Item")


class _Chains(NamedTuple):
    """The arguments of `verify_token`, in float64."""

    target_probs: Tensor
    draft_probs: Tensor
    token_ids: Sequence[int]
    num_nodes: Sequence[int]


def verify_token(
    target_probs: Tensor,
    draft_probs: Tensor,
    token_ids: Sequence[int],
    accept_uniforms: Tensor,
    num_nodes: Sequence[int],
) -> tuple[list[int], Tensor]:
    """Token-level rejection sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

    Chain i has num_nodes[i] = K draft tokens; nodes = sum of K, rows = sum of K + 1. Takes target_probs [rows, vocab],
    draft_probs [nodes, vocab], token_ids [nodes], accept_uniforms [nodes]. Returns for each chain the number accepted,
    and weights [chains, vocab] proportional to the distribution of the token after them, in float64.
    Raises ValueError if a draft token has probability 0 in its draft row.
    """
    chains = _Chains(target_probs.double(), draft_probs.double(), token_ids, num_nodes=num_nodes)
    accepted = []
    for scores, uniforms in zip(_scored(chains), _by_chain(accept_uniforms.tolist(), num_nodes), strict=True):
        passed = [uniform < target / draft for (target, draft), uniform in zip(scores, uniforms, strict=True)]
        accepted.append([*passed, False].index(False))
    return accepted, _following(chains, accepted, [1.0] * len(accepted))


def verify_block(
    target_probs: Tensor,
    draft_probs: Tensor,
    token_ids: Sequence[int],
    accept_uniforms: Tensor,
    num_nodes: Sequence[int],
) -> tuple[list[int], Tensor]:
    """Block verification (Sun et al., 2403.10444): on average accepts at least as many tokens, at no extra cost.

    Arguments, result and errors are those of `verify_token`.
    """
    chains = _Chains(target_probs.double(), draft_probs.double(), token_ids, num_nodes=num_nodes)
    # Per chain the probability ratios of x_1..x_i, target to draft, cut at 1 after each factor.
    joints = []
    for scores in _scored(chains):
        joint = [1.0]
        for target, draft in scores:
            joint.append(min(1.0, joint[-1] * target / draft))
        joints.append(joint)
    uniforms = _by_chain(accept_uniforms.tolist(), num_nodes)
    left_over = _left_over(chains, joints)
    accepted = [_last_success(*chain) for chain in zip(joints, left_over, uniforms, strict=True)]
    scales = [joint[num] for joint, num in zip(joints, accepted, strict=True)]
    return accepted, _following(chains, accepted, scales)


def _last_success(joint: Sequence[float], left_over: Sequence[float], uniforms: Sequence[float]) -> int:
    """Block verification of one chain: the number accepted."""
    num_nodes, num_accepted = len(joint) - 1, 0
    for i, uniform in zip(range(1, num_nodes + 1), uniforms, strict=True):
        if i < num_nodes:
            rest = left_over[i] + 1.0 - joint[i]
            threshold = left_over[i] / rest if rest > 0.0 else 1.0
        else:
            threshold = joint[i]
        if uniform < threshold:
            num_accepted = i  # no break: the last success counts, not the first failure
    return num_accepted


def descend(
    tree_token_ids: Sequence[int], parents: Sequence[int], target_tokens: Sequence[int]
) -> tuple[list[int], int]:
    """Coupled and greedy verification of a token tree: follow the target's tokens while the tree has them.

    Node i is tree_token_ids[i] below node parents[i], or below the root if that is -1. target_tokens[0] is
    the target's token after the root, target_tokens[i + 1] its token after node i. Returns the accepted nodes
    from the root down and the token after them. The text does not depend on the tree; only the number of
    tokens per round does.
    """
    child = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tree_token_ids, strict=True))}
    accepted: list[int] = []
    node, token = -1, target_tokens[0]
    while (node, token) in child:
        node = child[node, token]
        accepted.append(node)
        token = target_tokens[node + 1]
    return accepted, token


def _scored(chains: _Chains) -> list[list[tuple[float, float]]]:
    """Per chain each draft token's probability under target and draft."""
    target_probs, draft_probs, token_ids, num_nodes = chains
    entries = [_scoring_rows(num_nodes), range(len(token_ids)), token_ids]
    row, node, token = indices(entries, target_probs.device)  # [nodes] each
    scored = torch.stack([target_probs[row, token], draft_probs[node, token]], 1).tolist()
    # Such a token was not drawn from these rows; neither to accept nor to reject it would be lossless.
    if any(draft <= 0.0 for _, draft in scored):
        raise ValueError("a draft token has no probability in its draft distribution")
    return _by_chain([(target, draft) for target, draft in scored], num_nodes)


def _left_over(chains: _Chains, joints: Sequence[Sequence[float]]) -> list[list[float]]:
    """Per chain the target's mass that remains after x_1..x_i for 0 <= i < K, given the probability ratios of these.

    torch sums a single row in parts, one per thread. So the sum of a chain of one node would depend on the other
    chains, but nothing reads it.
    """
    target_probs, draft_probs, _, num_nodes = chains
    scales = numbers([ratio for joint in joints for ratio in joint[:-1]], target_probs.device)[:, None]  # [nodes, 1]
    target_rows = target_probs[indices(_scoring_rows(num_nodes), target_probs.device)]
    excess = target_rows.mul_(scales).sub_(draft_probs)  # [nodes, vocab]
    return _by_chain(excess.clamp_(min=0.0).sum(-1).tolist(), num_nodes)


def _following(chains: _Chains, accepted: Sequence[int], joints: Sequence[float]) -> Tensor:  # [chains, vocab]
    """Weights of the token after each chain's accepted ones, which have the probability ratio ``joints``: the target's
    row for a bonus, else the residual."""
    target_probs, draft_probs, _, num_nodes = chains
    firsts = [0, *itertools.accumulate(num_nodes)]
    rows = [first + chain + num for chain, (first, num) in enumerate(zip(firsts, accepted, strict=False))]
    rejected = [chain for chain, num in enumerate(accepted) if num < num_nodes[chain]]
    nodes = [firsts[chain] + accepted[chain] for chain in rejected]
    chain, node = indices([rejected, nodes], target_probs.device)  # [rejected] each
    scales = numbers([joints[chain] for chain in rejected], target_probs.device)[:, None]
    following = target_probs[indices(rows, target_probs.device)]
    following[chain] = _residual(scales, following[chain], draft_probs[node])
    return following


def _residual(joint: Tensor, target_rows: Tensor, draft_rows: Tensor) -> Tensor:  # [rows, vocab]
    """Weights of the target's tokens after a rejection: max(joint * target - draft, 0). ``joint`` is [rows, 1]."""
    residual = (joint * target_rows - draft_rows).clamp_(min=0.0)
    # No mass is left if both rows agree. Only rounding leads here, and then the target row is right.
    return torch.where(residual.amax(-1, keepdim=True) > 0.0, residual, target_rows)


def _scoring_rows(num_nodes: Sequence[int]) -> list[int]:
    """The target row that scores each node: each chain has one more row than nodes."""
    chains = [chain for chain, num in enumerate(num_nodes) for _ in range(num)]
    return [node + chain for node, chain in enumerate(chains)]


def _by_chain(values: Sequence[_Item], num_nodes: Sequence[int]) -> list[list[_Item]]:
    if len(values) != sum(num_nodes):
        raise ValueError(f"{len(values)} numbers for {sum(num_nodes)} nodes")
    rest = iter(values)
    return [list(itertools.islice(rest, num)) for num in num_nodes]
