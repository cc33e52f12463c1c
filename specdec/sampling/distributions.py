"""From logits to a distribution, and from a distribution to a token.

A batch has rows of many sequences, each with its parameters. The result of a row does not depend on the other
rows, bit for bit: the order of summation depends on the row alone. Every function is deterministic: ties go to the
lowest token id, and a draw is an exponential race over noise that the caller supplies (`specdec.core.noise`).
Distributions are float64, so that the logits decide the order of two tokens, not rounding here. A removed token has
the score -inf. Penalties, bias and grammar come before (`specdec.sampling.logits_processors`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.core.device import indices, numbers, sent
from specdec.core.noise import LOG_RANGE
from specdec.core.sequence import SamplingParams
from specdec.core.tree import SparseDistribution

SPARSE_SUPPORT_SIZE = 64  # at K = 7 and a vocabulary of 128k: 2.7 kB per round instead of 1.8 MB
_TOP_P_SIZES = (64, 1024)
_NUMBERS_PER_QUAD = 4


class Noise(Protocol):
    """The exponentials of the rows of a batch, drawn on demand."""

    def rows(self, rows: Sequence[int]) -> Tensor:  # [len(rows), vocab] float64
        """All exponentials of ``rows``."""

    def at(self, rows: Tensor, token_ids: Tensor) -> Tensor:  # [n] float64
        """The exponentials of rows [n] at token_ids [n]; cheaper than whole rows if they are few."""


def transformed_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:  # [rows, vocab] float64
    """Temperature, then top-k, then top-p, then min-p over logits [rows, vocab]; removed tokens become -inf.

    ``params`` has one entry per row. Order and meaning are those of transformers' warpers, with one exception: top-k
    keeps exactly k tokens even if the k-th and the next are tied. Top-p keeps the smallest set with a mass of at least
    top_p, renormalised over the tokens that top-k keeps. The most likely token always stays. Needs temperatures > 0;
    for 0 see `greedy`.
    """
    vocab_size = logits.shape[-1]
    scores = logits.to(torch.float64, copy=True).div_(_column([p.temperature for p in params], logits))  # [rows, vocab]
    if rows := [row for row, p in enumerate(params) if 0 < p.top_k < vocab_size]:
        _edit(scores, rows, lambda chosen: _top_k(chosen, [params[row].top_k for row in rows]))
    if rows := [row for row, p in enumerate(params) if p.top_p < 1.0]:
        _edit(scores, rows, lambda chosen: _top_p(chosen, [params[row] for row in rows]))
    if rows := [row for row, p in enumerate(params) if p.min_p > 0.0]:
        _edit(scores, rows, lambda chosen: _min_p(chosen, [params[row].min_p for row in rows]))
    return scores


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:  # [rows, vocab] float64
    """The distribution of the next token after each row of logits [rows, vocab]. Needs temperatures > 0."""
    return transformed_logits(logits, params).softmax(-1)


def race(scores_log: Tensor, exponentials: Tensor) -> Tensor:  # [rows] int64
    """The winner of the exponential race: argmin E / weight, which is a draw from the normalised weights.

    scores_log [rows, vocab] are log-weights up to a constant per row, -inf for no mass; exponentials have the
    same shape. A row without any mass has no winner; its result is undefined.
    """
    return exponentials.log().sub_(scores_log).argmin(-1)


def greedy(logits: Tensor) -> Tensor:  # [rows] int64
    """The most likely token of each row of logits [rows, vocab]; of ties the lowest id, as torch's argmax does."""
    # On a CPU torch's argmax takes three times as long in half precision as in float32.
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).argmax(-1)


def sample_coupled(logits: Tensor, params: Sequence[SamplingParams], noise: Noise) -> Tensor:  # [rows] int64
    """Coupled sampling: the token that each row's noise selects from logits [rows, vocab] (Daliri et al., 2408.07978).

    ``params`` has one entry per row. Draft and target use the same noise: close distributions then mostly select the
    same token, and the target's token does not depend on the draft. Greedy rows need no noise.
    """
    drawn = [row for row, p in enumerate(params) if not p.greedy]
    if not drawn:
        return greedy(logits)
    all_drawn = len(drawn) == len(params)
    rows = _index(drawn, logits)
    scores = transformed_logits(logits if all_drawn else logits[rows], [params[row] for row in drawn])
    tokens = _race_of_possible(scores, drawn, noise)
    return tokens if all_drawn else greedy(logits).index_copy(0, rows, tokens)


def most_likely_draws(
    logits: Tensor, params: Sequence[SamplingParams], noise: Noise, *, count: int
) -> tuple[Tensor, Tensor]:
    """The ``count`` tokens that `sample_coupled` most likely selects from similar logits, and their scores: [rows,
    count] int64 and float64.

    Ranked by log q + noise before any filter: draft and target disagree mostly about the filters and about the order
    of the first few tokens (bench/LOG.md, 2026-11-22). Greedy rows are ranked by their logits.
    """
    scores = logits.to(torch.float64, copy=True)  # [rows, vocab]
    drawn = [row for row, p in enumerate(params) if not p.greedy]
    if drawn:
        temperatures = _column([params[row].temperature for row in drawn], logits)
        rows = _index(drawn, logits)
        scores[rows] = scores[rows] / temperatures - noise.rows(drawn).log()
    best = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return best.indices, best.values


def _race_of_possible(scores: Tensor, rows: Sequence[int], noise: Noise) -> Tensor:  # [rows] int64
    """`race` over scores [rows, vocab] and the noise of ``rows``, drawn only for tokens that can win.

    A token more than LOG_RANGE below the most likely one cannot win with any noise. If few tokens remain after this
    and the filters, noise is drawn for those alone. The winner is the same either way.
    """
    possible = scores >= scores.amax(-1, keepdim=True) - LOG_RANGE  # [rows, vocab]
    counts = possible.sum(-1).tolist()
    few = [row for row, count in enumerate(counts) if 0 < count * _NUMBERS_PER_QUAD < scores.shape[-1]]
    if not few:
        return race(scores, noise.rows(rows))
    tokens = torch.empty(len(counts), dtype=torch.int64, device=scores.device)
    if many := sorted(set(range(len(counts))).difference(few)):
        at_many = _index(many, scores)
        tokens[at_many] = race(scores[at_many], noise.rows([rows[row] for row in many]))
    at_few = _index(few, scores)
    row, token_ids = possible[at_few].nonzero(as_tuple=True)  # [n] each: by row, then by token id
    lead = (
        scores[at_few[row], token_ids] - noise.at(_index([rows[i] for i in few], scores)[row], token_ids).log()
    )  # [n]
    # The drawn numbers of each row in a padded row, so that one argmax serves all rows.
    num_drawn = _index([counts[row] for row in few], scores)  # [few]
    first = num_drawn.cumsum(0) - num_drawn  # [few]
    lined_up = scores.new_full((len(few), max(counts[row] for row in few)), -math.inf)
    lined_up[row, torch.arange(len(row), device=scores.device) - first[row]] = lead
    tokens[at_few] = token_ids[first + lined_up.argmax(-1)]
    return tokens


def sparse_support(
    probs: Tensor, size: int = SPARSE_SUPPORT_SIZE
) -> tuple[Tensor, Tensor]:  # [rows, m] int64, [rows, m] float64
    """The `size` most likely tokens of each row of probs [rows, vocab], most likely first, with weights exact in fp16.

    The largest weight is 1. Weights that round to 0, the last of a row, do not belong to the support. The draft must
    sample from `dense_from_sparse` of the result, not from probs; otherwise verification is not lossless.
    """
    size = min(size, probs.shape[-1])
    best = probs.topk(size, dim=-1).values  # [rows, size], descending
    token_ids = _is_best(probs, best[:, -1:], size).nonzero()[:, 1].view(-1, size)  # ascending in each row
    likely = probs.gather(-1, token_ids)
    # A stable sort puts the lowest id first among ties.
    likely, order = likely.sort(dim=-1, descending=True, stable=True)
    return token_ids.gather(-1, order), (likely / best[:, :1]).half().double()


def dense_from_sparse(
    distributions: Sequence[SparseDistribution], vocab_size: int, device: torch.device
) -> Tensor:  # [distributions, vocab] float64
    """The dense form of each distribution: w / sum(w), and 0 elsewhere.

    The same bits on every machine: a sum of fp16 numbers up to 1 is exact in float64, in any order.
    Raises ValueError if ids repeat or are out of range, or if weights are not finite or not positive.
    """
    lengths = [len(distribution.token_ids) for distribution in distributions]
    if 0 in lengths or lengths != [len(distribution.weights) for distribution in distributions]:
        raise ValueError("a sparse distribution needs as many weights as token ids, and at least one")
    ids = np.fromiter(chain.from_iterable(distribution.token_ids for distribution in distributions), np.int64)
    weights = np.fromiter(chain.from_iterable(distribution.weights for distribution in distributions), np.float64)
    rows = np.repeat(np.arange(len(lengths)), lengths)
    if not ((ids >= 0) & (ids < vocab_size)).all():
        raise ValueError(f"a sparse distribution names a token outside the vocabulary of {vocab_size}")
    if len(np.unique(rows * vocab_size + ids)) < len(ids):
        raise ValueError("a sparse distribution names a token twice")
    if not (np.isfinite(weights) & (weights > 0)).all():
        raise ValueError("a sparse distribution has a weight that is not finite and positive")
    probs = weights / np.bincount(rows, weights)[rows]
    dense = torch.zeros(len(lengths), vocab_size, dtype=torch.float64, device=device)
    dense[tuple(sent(torch.from_numpy(index), device) for index in (rows, ids))] = sent(torch.from_numpy(probs), device)
    return dense


def _edit(scores: Tensor, rows: Sequence[int], remove: Callable[[Tensor], None]) -> None:
    """Let ``remove`` write into ``rows`` of scores [rows, vocab]."""
    if len(rows) == len(scores):
        remove(scores)
        return
    index = _index(rows, scores)
    chosen = scores[index]
    remove(chosen)
    scores[index] = chosen


def _top_k(scores: Tensor, top_k: Sequence[int]) -> None:
    num_kept = _index(top_k, scores)[:, None]  # [rows, 1]
    best = scores.topk(max(top_k), dim=-1).values  # [rows, largest top_k], descending
    _keep_best(scores, best.gather(-1, num_kept - 1), num_kept)


def _top_p(scores: Tensor, params: Sequence[SamplingParams]) -> None:
    vocab_size = scores.shape[-1]
    probs = scores.softmax(-1)  # [rows, vocab]
    top_p = _column([p.top_p for p in params], scores)  # [rows, 1]
    num_kept = _index([0] * len(params), scores)[:, None]  # [rows, 1]
    lowest = scores.new_zeros(len(params), 1)
    # Nearly every real distribution reaches top_p within few tokens, and sorting a whole vocabulary takes much longer.
    pending = torch.arange(len(params), device=scores.device)
    for size in (*(size for size in _TOP_P_SIZES if size < vocab_size), vocab_size):
        best = probs[pending].topk(size, dim=-1)  # [pending, size], descending
        mass = best.values.cumsum(-1)
        # A token stays if the mass before it is below top_p; for the first token that mass is 0.
        num = 1 + (mass[:, :-1] < top_p[pending]).sum(-1, keepdim=True)  # [pending, 1]
        num_kept[pending] = num
        lowest[pending] = scores[pending].gather(-1, best.indices.gather(-1, num - 1))
        pending = pending[mass[:, -1] < top_p[pending, 0]]
        if not len(pending):
            break
    _keep_best(scores, lowest, num_kept)


def _min_p(scores: Tensor, min_p: Sequence[float]) -> None:
    floor = scores.amax(-1, keepdim=True) + _column([math.log(min(p, 1.0)) for p in min_p], scores)  # [rows, 1]
    scores.masked_fill_(scores < floor, -math.inf)


def _keep_best(scores: Tensor, lowest: Tensor, num_kept: Tensor) -> None:
    """Remove all but the num_kept [rows, 1] highest of scores [rows, vocab]; see `_is_best`."""
    kept = scores >= lowest
    # Only rows with ties at the edge need the full rule.
    with_ties = (kept.sum(-1) > num_kept[:, 0]).nonzero()[:, 0]
    if len(with_ties):
        kept[with_ties] = _is_best(scores[with_ties], lowest[with_ties], num_kept[with_ties])
    scores.masked_fill_(~kept, -math.inf)


def _is_best(scores: Tensor, lowest: Tensor, num_kept: Tensor | int) -> Tensor:  # [rows, vocab] bool
    """Mark the num_kept highest of scores [rows, vocab], and of ties the lowest ids.

    lowest [rows, 1] is the lowest score kept. A sort gives that score reliably, but not its token: the order of
    ties, which are common in half precision, depends on the device.
    """
    above = scores > lowest  # [rows, vocab]
    tied = scores == lowest  # [rows, vocab]
    room = num_kept - above.sum(-1, keepdim=True)  # [rows, 1]
    return above | (tied & (tied.cumsum(-1) <= room))


def _column(values: Sequence[float], like: Tensor) -> Tensor:  # [rows, 1] float64
    return numbers(values, like.device)[:, None]


def _index(values: Sequence[int], like: Tensor) -> Tensor:  # [n] int64
    return indices(values, like.device)
