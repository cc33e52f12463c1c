"""Knows how logits become a distribution and how a token is drawn from it; refuses to know who asks, and why.

Every function is deterministic: ties go to the lowest token id, and a draw is an exponential race over noise
that the caller brings (`noise.exponentials`). Distributions are float64, so that the order of two tokens is
decided by the logits and not by rounding here. A removed token has the score -inf. Penalties, bias and
grammar are applied to the logits before they come here.
"""

from __future__ import annotations

import math

from torch import Tensor

from specdec.sequence import SamplingParams

SPARSE_SUPPORT_SIZE = 64  # at K = 7 and a vocabulary of 128k: 2.7 kB a round instead of 1.8 MB
_NUCLEUS_GUESS = 1024


def transformed_logits(logits: Tensor, params: SamplingParams) -> Tensor:  # [rows, vocab] float64
    """Temperature, then top-k, then top-p, then min-p over logits [rows, vocab]; removed tokens become -inf.

    The order and the meaning are those of transformers' warpers, except that exactly k tokens survive top-k
    when the k-th and the next are tied. Top-p keeps the smallest set whose mass, renormalised over what top-k
    left, reaches top_p. At least the likeliest token survives. Needs temperature > 0; 0 is `greedy`.
    """
    scores = logits.double() / params.temperature  # [rows, vocab]
    vocab_size = scores.shape[-1]
    if 0 < params.top_k < vocab_size:
        best = scores.topk(params.top_k, dim=-1).values  # [rows, top_k], descending
        scores = scores.masked_fill(~_is_best(scores, best[:, -1:], params.top_k), -math.inf)
    if params.top_p < 1.0:
        total = scores.logsumexp(-1, keepdim=True)  # [rows, 1]
        # Nearly every real distribution reaches top_p early; to sort a whole vocabulary takes much longer.
        # What is kept of a row does not depend on which size its neighbours make us take.
        for size in (min(params.top_k or _NUCLEUS_GUESS, vocab_size), vocab_size):
            best = scores.topk(size, dim=-1).values  # [rows, size], descending
            mass = (best - total).exp().cumsum(-1)  # [rows, size]
            if bool((mass[:, -1] >= params.top_p).all()):
                break
        # A token stays while the mass before it falls short; before the first there is none.
        num_kept = 1 + (mass[:, :-1] < params.top_p).sum(-1, keepdim=True)  # [rows, 1]
        scores = scores.masked_fill(~_is_best(scores, best.gather(-1, num_kept - 1), num_kept), -math.inf)
    if params.min_p > 0.0:
        floor = scores.amax(-1, keepdim=True) + math.log(min(params.min_p, 1.0))  # [rows, 1]
        scores = scores.masked_fill(scores < floor, -math.inf)
    return scores


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:  # [rows, vocab] float64
    """The distribution of the next token after each row of logits [rows, vocab]. Needs temperature > 0."""
    return transformed_logits(logits, params).softmax(-1)


def race(scores_log: Tensor, exponentials: Tensor) -> Tensor:  # [rows] int64
    """The winner of the exponential race: argmin E / weight, which is a draw from the normalised weights.

    scores_log [rows, vocab] are log-weights up to a constant per row, -inf for no mass; exponentials have the
    same shape. A row without any mass has no winner, and the answer for it means nothing.
    """
    return (scores_log - exponentials.log()).argmax(-1)


def greedy(logits: Tensor) -> Tensor:  # [rows] int64
    """The most likely token of each row of logits [rows, vocab]; torch's argmax gives the first of equals."""
    return logits.argmax(-1)


def sample_coupled(logits: Tensor, params: SamplingParams, exponentials: Tensor | None) -> Tensor:  # [rows] int64
    """The token that the noise of each position picks from logits [rows, vocab] (Daliri et al., 2408.07978).

    Run on both sides with the same exponentials [rows, vocab] it couples draft and target: close
    distributions mostly pick the same token, and what the target picks does not depend on the draft. Greedy
    needs no noise.
    """
    if params.temperature == 0.0:
        return greedy(logits)
    if exponentials is None:
        raise ValueError("sampling at a temperature above 0 needs exponentials")
    return race(transformed_logits(logits, params), exponentials)


def sparse_support(
    probs_row: Tensor, size: int = SPARSE_SUPPORT_SIZE
) -> tuple[Tensor, Tensor]:  # [m] int64, [m] float64
    """The `size` likeliest tokens of probs_row [vocab], likeliest first, with weights exact in fp16.

    The largest weight is 1; tokens whose weight rounds to 0 are left out, so m <= size. The draft must sample
    from `dense_from_sparse` of the result, not from probs_row: only then is verification against it lossless.
    """
    best = probs_row.topk(min(size, probs_row.numel())).values  # [size], descending
    token_ids = _is_best(probs_row, best[-1:], best.numel()).nonzero()[:, 0]  # [size], ascending
    # Stable, so that of equals the lowest id comes first.
    token_ids = token_ids[probs_row[token_ids].sort(descending=True, stable=True).indices]  # [size]
    weights = (probs_row[token_ids] / best[0]).half().double()  # [size]
    positive = weights > 0  # [size]
    return token_ids[positive], weights[positive]


def dense_from_sparse(token_ids: Tensor, weights: Tensor, vocab_size: int) -> Tensor:  # [vocab] float64
    """The distribution that token_ids [m] and weights [m] stand for: w / sum(w), and 0 elsewhere.

    The same bits on every machine: a sum of fp16 numbers up to 1 is exact in float64, in whatever order.
    Raises ValueError for what no honest draft sends: ids twice or out of range, weights not finite or not
    positive.
    """
    ids: list[int] = token_ids.tolist()
    if not ids or token_ids.shape != weights.shape:
        raise ValueError("a sparse distribution needs as many weights as token ids, and at least one")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise ValueError(f"a sparse distribution names a token outside the vocabulary of {vocab_size}")
    if len(set(ids)) != len(ids):
        raise ValueError("a sparse distribution names a token twice")
    weights = weights.double()
    if not bool((weights.isfinite() & (weights > 0)).all()):
        raise ValueError("a sparse distribution has a weight that is not finite and positive")
    dense = weights.new_zeros(vocab_size)  # [vocab]
    dense[token_ids] = weights / weights.sum()
    return dense


def _is_best(scores: Tensor, lowest: Tensor, num_kept: Tensor | int) -> Tensor:  # [..., vocab] bool
    """Marks the num_kept highest of scores [..., vocab], of equals the lowest ids.

    lowest [..., 1] is the lowest score kept. A sort can be asked for that score but not for its token: the
    order of equals, which are common in half precision, depends on the device.
    """
    above = scores > lowest  # [..., vocab]
    tied = scores == lowest  # [..., vocab]
    room = num_kept - above.sum(-1, keepdim=True)  # [..., 1]
    return above | (tied & (tied.cumsum(-1) <= room))
