"""How often a draft's proposal agrees with the target, computed exactly from both distributions.

All functions take logits of shape (positions, vocabulary) and return one value per position.
"""

from __future__ import annotations

import torch
from torch import Tensor


def greedy(target: Tensor, draft: Tensor) -> Tensor:
    """1 where both models have the same most likely token, else 0: acceptance at temperature 0."""
    return (target.argmax(-1) == draft.argmax(-1)).double()


def overlap(target: Tensor, draft: Tensor) -> Tensor:
    """Sum over tokens of min(p, q): acceptance of rejection sampling at temperature 1."""
    p, q = target.double().softmax(-1), draft.double().softmax(-1)
    return torch.minimum(p, q).sum(-1)


def coupled(target: Tensor, draft: Tensor) -> Tensor:
    """Probability at temperature 1 that two exponential races with shared random numbers have the same winner.

    The probability that token i wins both races is 1 / sum_j max(p_j / p_i, q_j / q_i). In the order of the ratio
    p / q, the tokens after i contribute p_j / p_i and the others q_j / q_i. So one sort and two cumulative sums give
    all terms.
    """
    log_p, log_q = target.double().log_softmax(-1), draft.double().log_softmax(-1)
    order = (log_p - log_q).argsort(-1)
    p, q = log_p.gather(-1, order).exp(), log_q.gather(-1, order).exp()
    p_after = (p.flip(-1).cumsum(-1).flip(-1) - p).clamp_min(0)
    q_until = q.cumsum(-1)
    tiny = torch.finfo(torch.float64).tiny
    return (1 / (p_after / p.clamp_min(tiny) + q_until / q.clamp_min(tiny))).sum(-1)
