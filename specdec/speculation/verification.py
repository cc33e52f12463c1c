"""Verification: which draft tokens are accepted, and the distribution of the next token. Does not know their source.

K draft tokens x_1..x_K come with K draft rows and K + 1 target rows. Row i is the distribution after
x_1..x_i, so row i - 1 scores x_i, and target row K follows the last draft token. *Accepted* are
x_1..x_n. After them the caller draws one token from the returned distribution: the *correction*
if n < K, the *bonus* if n == K. So each call yields 1 to K + 1 tokens, and all of them follow the target's
distribution.

The draft rows must be the distributions that the tokens were drawn from. The accept uniforms must be keyed by base
as well as position: block verification reads uniforms beyond the token at which it stops, and the next round must
not use them again. Under coupled and greedy sampling the target draws its own tokens, and `descend` suffices.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def verify_token(
    target_probs: Tensor, draft_probs: Tensor, token_ids: Tensor, accept_uniforms: Tensor
) -> tuple[int, Tensor]:
    """Token-level rejection sampling (Leviathan et al., 2211.17192; Chen et al., 2302.01318).

    Takes target_probs [K + 1, vocab], draft_probs [K, vocab], token_ids [K], accept_uniforms [K].
    Returns the number accepted and the distribution [vocab] of the token after them, in float64.
    Raises ValueError if a draft token has probability 0 in its draft row.
    """
    target_probs, draft_probs = target_probs.double(), draft_probs.double()
    scored = _scored(target_probs, draft_probs, token_ids)
    num_draft_tokens = len(scored)

    num_accepted = 0
    for (target, draft), uniform in zip(scored, accept_uniforms.tolist(), strict=True):
        if uniform >= target / draft:
            break
        num_accepted += 1

    if num_accepted == num_draft_tokens:
        return num_accepted, target_probs[num_draft_tokens]
    return num_accepted, _residual(1.0, target_probs[num_accepted], draft_probs[num_accepted])


def verify_block(
    target_probs: Tensor, draft_probs: Tensor, token_ids: Tensor, accept_uniforms: Tensor
) -> tuple[int, Tensor]:
    """Block verification (Sun et al., 2403.10444): on average accepts at least as many tokens, at no extra cost.

    Arguments, result and errors are those of `verify_token`.
    """
    target_probs, draft_probs = target_probs.double(), draft_probs.double()
    scored = _scored(target_probs, draft_probs, token_ids)
    num_draft_tokens = len(scored)

    # Probability ratio of x_1..x_i, target to draft, cut at 1 after each factor.
    joint = [1.0]
    for target, draft in scored:
        joint.append(min(1.0, joint[-1] * target / draft))

    # The target's remaining mass after x_1..x_i, for 0 < i < K; all rows at once.
    scale = target_probs.new_tensor(joint[1:num_draft_tokens])[:, None]  # [K - 1, 1]
    excess = scale * target_probs[1:num_draft_tokens] - draft_probs[1:]  # [K - 1, vocab]
    left_over = excess.clamp(min=0.0).sum(-1).tolist()

    num_accepted = 0
    for i, uniform in zip(range(1, num_draft_tokens + 1), accept_uniforms.tolist(), strict=True):
        if i < num_draft_tokens:
            mass = left_over[i - 1]
            rest = mass + 1.0 - joint[i]
            threshold = mass / rest if rest > 0.0 else 1.0
        else:
            threshold = joint[i]
        if uniform < threshold:
            num_accepted = i  # no break: the last success counts, not the first failure

    if num_accepted == num_draft_tokens:
        return num_accepted, target_probs[num_draft_tokens]
    return num_accepted, _residual(joint[num_accepted], target_probs[num_accepted], draft_probs[num_accepted])


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


def _scored(target_probs: Tensor, draft_probs: Tensor, token_ids: Tensor) -> list[tuple[float, float]]:
    """Each draft token's probability under target and draft, from [K + 1, vocab], [K, vocab] and [K]."""
    index = token_ids[:, None]  # [K, 1]
    target: list[float] = target_probs[:-1].gather(1, index)[:, 0].tolist()
    draft: list[float] = draft_probs.gather(1, index)[:, 0].tolist()
    # Such a token was not drawn from these rows; neither to accept nor to reject it would be lossless.
    if any(prob <= 0.0 for prob in draft):
        raise ValueError("a draft token has no probability in its draft distribution")
    return list(zip(target, draft, strict=True))


def _residual(joint: float, target_row: Tensor, draft_row: Tensor) -> Tensor:  # [vocab]
    """The residual distribution of the target after a rejection: norm(max(joint * target - draft, 0))."""
    residual = (joint * target_row - draft_row).clamp(min=0.0)  # [vocab]
    total = residual.sum()
    # A total of 0 means that both rows agree. Only rounding leads here, and then the target row is right.
    return residual / total if bool(total > 0.0) else target_row
