"""Laws of the distributions and of the draw: transformers' warpers, the race, the sparse support."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.core.noise import Domain, Key, exponentials
from specdec.core.sequence import SamplingParams
from specdec.core.tree import SparseDistribution
from specdec.sampling.distributions import (
    dense_from_sparse,
    greedy,
    probabilities,
    race,
    sample_coupled,
    sparse_support,
    transformed_logits,
)
from specdec.sampling.noise_cache import KeptRows, PassNoise


def keys(positions, seed):
    return [Key(seed, position) for position in positions]


def coupled(logits, params, seed, positions):
    """What the noise of these positions picks from logits [positions, vocab], all with the same parameters."""
    noise = PassNoise(keys(positions, seed), logits.shape[-1], logits.device, KeptRows())
    return sample_coupled(logits, [params] * len(logits), noise)


def warped(logits, params):
    """transformers' answer, in the order in which its generate() applies the warpers."""
    warpers = LogitsProcessorList()
    if params.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        warpers.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1.0:
        warpers.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        warpers.append(MinPLogitsWarper(params.min_p))
    return warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits.double())


def by_the_book(logits, params):
    """The definition, token by token: an independent reference that also fixes the order of equals."""
    scores = np.asarray(logits, dtype=np.float64) / params.temperature
    ranked = sorted(range(len(scores)), key=lambda v: (-scores[v], v))
    kept = ranked[: params.top_k or len(ranked)]
    weights = {v: math.exp(scores[v] - scores[ranked[0]]) for v in kept}
    if params.top_p < 1.0:
        nucleus, mass = [], 0.0
        for v in kept:
            if nucleus and mass >= params.top_p * sum(weights.values()):
                break
            nucleus.append(v)
            mass += weights[v]
        kept = nucleus
    kept = [v for v in kept if weights[v] >= params.min_p]
    expected = np.zeros(len(scores))
    for v in kept:
        expected[v] = weights[v] / sum(weights[w] for w in kept)
    return expected


GRID = [
    SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    for temperature in (0.3, 1.0, 1.7)
    for top_k in (0, 1, 7, 200, 10_000)
    for top_p in (1.0, 0.95, 0.5, 0.01)
    for min_p in (0.0, 0.05, 0.9)
]


@pytest.mark.parametrize("scale", [0.1, 5.0])
def test_transforms_are_those_of_transformers(scale):
    logits = scale * torch.randn(3, 300, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for params in GRID:
        ours, theirs = transformed_logits(logits, [params] * 3), warped(logits, params)
        assert torch.equal(ours.isneginf(), theirs.isneginf()), params
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.integers(-4, 4), min_size=1, max_size=12),
    temperature=st.sampled_from([0.5, 1.0, 2.0]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([1.0, 0.93, 0.7, 0.31, 0.003]),
    min_p=st.sampled_from([0.0, 0.02, 0.3]),
)
def test_ties_go_to_the_lowest_id(logits, temperature, top_k, top_p, min_p):
    params = SamplingParams(temperature, top_k, top_p, min_p)
    ours = probabilities(torch.tensor([logits], dtype=torch.bfloat16), [params])[0]
    np.testing.assert_allclose(ours.numpy(), by_the_book(logits, params), atol=1e-12)


PARAMS = [
    SamplingParams(0.0),
    SamplingParams(1.0),
    SamplingParams(0.6),
    SamplingParams(0.7, 40),
    SamplingParams(1.3, 3, 0.5),
    SamplingParams(1.0, 0, 0.9),
    SamplingParams(1.0, 0, 0.99, 0.001),
    SamplingParams(0.8, 0, 1.0, 0.05),
    SamplingParams(0.9, 2000, 0.95, 0.02),
]


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "num_threads", "total"),
    [(50, torch.bfloat16, 1, 64), (8192, torch.float32, 1, 32), (40_000, torch.bfloat16, 2, 16)],
    ids=str,
)
def test_a_row_does_not_depend_on_its_company(vocab_size, dtype, num_threads, total, request):
    """Law: bit for bit, whatever its neighbours' logits, parameters, seeds and number."""
    request.addfinalizer(lambda: torch.set_num_threads(1))
    torch.set_num_threads(num_threads)
    generator = torch.Generator().manual_seed(3)
    scale = torch.tensor([0.01, 1.0, 3.0, 12.0]).repeat(total // 4)[:, None]  # flat rows beside peaked ones
    logits = (scale * torch.randn(total, vocab_size, generator=generator)).to(dtype)
    params = [PARAMS[row % len(PARAMS)] for row in range(total)]

    def answers(rows):
        """Of these rows together: tokens, scores, distributions, supports."""
        noise = PassNoise([Key(row, 5 * row) for row in rows], vocab_size, logits.device, KeptRows())
        tokens = sample_coupled(logits[rows], [params[row] for row in rows], noise).tolist()
        warm = [row for row in rows if not params[row].greedy]
        those = logits[warm], [params[row] for row in warm]
        probs = probabilities(*those)
        every = zip(transformed_logits(*those), probs, *sparse_support(probs), strict=True)
        return dict(zip(rows, tokens, strict=True)), dict(zip(warm, every, strict=True))

    alone = {row: answers([row]) for row in range(total) if not params[row].greedy}
    order = torch.randperm(total, generator=generator).tolist()
    for num_rows in (2, 3, 7, total):
        tokens, tensors = answers(order[:num_rows])
        for row, row_tensors in tensors.items():
            assert tokens[row] == alone[row][0][row]
            for ours, expected in zip(row_tensors, alone[row][1][row], strict=True):
                assert torch.equal(ours, expected)
        for row in set(tokens).difference(tensors):
            assert tokens[row] == int(logits[row].float().argmax())


@settings(max_examples=100, deadline=None)
@given(
    spread=st.floats(0.01, 60.0),
    params=st.sampled_from(PARAMS[1:]),
    seed=st.integers(0, 2**64 - 1),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_noise_is_left_out_only_where_it_could_not_have_won(spread, params, seed, dtype):
    generator = torch.Generator().manual_seed(seed % 1000)
    logits = (spread * torch.randn(3, 300, generator=generator)).to(dtype)
    everything = race(
        transformed_logits(logits, [params] * 3), exponentials(keys([4, 5, 6], seed), Domain.COUPLED, 300)
    )
    assert torch.equal(coupled(logits, params, seed, [4, 5, 6]), everything)


def test_rows_at_one_position_share_its_noise():
    logits = torch.randn(1, 40, generator=torch.Generator().manual_seed(8)).expand(4, 40)
    noise = PassNoise(keys([5, 6, 5, 6], 9), 40, logits.device, kept := KeptRows())
    tokens = sample_coupled(logits, [SamplingParams()] * 4, noise).tolist()
    assert tokens[:2] == tokens[2:]
    assert len(kept) == 2
    assert torch.equal(noise.rows([0, 1]), exponentials(keys([5, 6], 9), Domain.COUPLED, 40))


def test_a_row_of_nan_does_not_change_its_neighbours():
    logits = torch.randn(3, 40, generator=torch.Generator().manual_seed(8))
    for params in PARAMS:
        expected = coupled(logits, params, 3, [1, 2, 3]).tolist()
        spoilt = logits.clone()
        spoilt[1] = math.nan
        got = coupled(spoilt, params, 3, [1, 2, 3]).tolist()
        assert (got[0], got[2]) == (expected[0], expected[2])
        assert 0 <= got[1] < 40


def test_tokens_without_a_chance_keep_none_and_no_rows_give_no_rows():
    logits = torch.tensor([[0.0, -math.inf, 2.0, -math.inf, 1.0]])
    for params in (SamplingParams(), SamplingParams(top_k=4), SamplingParams(1.0, 4, 0.999, 0.001)):
        assert probabilities(logits, [params])[0, [1, 3]].tolist() == [0.0, 0.0]
        assert probabilities(logits, [params]).sum().item() == pytest.approx(1.0)
    assert transformed_logits(logits[:0], []).shape == (0, 5)
    assert coupled(logits[:0], SamplingParams(), 1, []).shape == (0,)


def test_the_race_draws_from_the_weights_and_survives_extreme_scores():
    num_draws = 40_000
    weights = torch.tensor([0.5, 0.0, 0.2, 0.25, 0.05], dtype=torch.float64)
    noise = exponentials(keys(range(num_draws), 11), Domain.CORRECTION, 5)
    drawn = race((3.0 * weights).log().expand(num_draws, 5), noise)
    counts = torch.bincount(drawn, minlength=5)
    assert counts[1] == 0
    expected = (weights[weights > 0] * num_draws).numpy()
    assert stats.chisquare(counts[weights > 0].numpy(), expected).pvalue > 1e-4
    extreme = torch.tensor([[-math.inf, -1e300, -math.inf], [1e300, 0.0, -1e300]], dtype=torch.float64)
    assert race(extreme, torch.tensor([[2.0**-33, 22.9, 1.0]] * 2, dtype=torch.float64)).tolist() == [1, 0]


def test_greedy_takes_the_lowest_of_equals():
    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.zeros(3, 70_001, dtype=dtype)
        logits[0, [4097, 9, 70_000]] = 1.0
        logits[1, [70_000, 65_536]] = 1.0
        assert greedy(logits).tolist() == [9, 65_536, 0]
        assert greedy(logits[:, ::7]).tolist() == [10_000, 10_000, 0]  # not contiguous; 70_000 is 7 * 10_000


def test_temperature_zero_is_greedy_without_noise_and_top_k_one_with_any():
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(4))
    chosen = sample_coupled(logits, [SamplingParams(temperature=0.0, top_k=3)] * 50, noise=None)
    assert torch.equal(chosen, greedy(logits))
    assert torch.equal(coupled(logits, SamplingParams(top_k=1), 1, range(50)), greedy(logits))


@pytest.mark.parametrize("seed", [1, 2])
def test_coupled_draws_agree_as_often_as_the_formula_says(seed):
    generator = torch.Generator().manual_seed(seed)
    num_draws, vocab_size = 20_000, 8
    logits = 1.5 * torch.randn(2, vocab_size, generator=generator, dtype=torch.float64)
    draft_probs, target_probs = logits.softmax(-1)
    draft, target = (
        coupled(row.expand(num_draws, vocab_size), SamplingParams(), seed, range(num_draws)) for row in logits
    )

    # P[both pick i] = 1 / sum_j max(target_j / target_i, draft_j / draft_i)
    per_token = torch.maximum(target_probs / target_probs[:, None], draft_probs / draft_probs[:, None])
    expected = (1.0 / per_token.sum(-1)).sum().item()
    same = (draft == target).double().mean().item()
    assert abs(same - expected) < 4.5 * math.sqrt(expected * (1 - expected) / num_draws)

    distance = 0.5 * (target_probs - draft_probs).abs().sum().item()
    assert (1 - distance) / (1 + distance) - 1e-12 <= expected <= 1 - distance + 1e-12
    # Coupling leaves each side with its own distribution.
    for drawn, probs in ((draft, draft_probs), (target, target_probs)):
        counts = torch.bincount(drawn, minlength=vocab_size).numpy()
        assert stats.chisquare(counts, (probs * num_draws).numpy()).pvalue > 1e-4


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.integers(-30, 30), min_size=1, max_size=100),
    size=st.integers(1, 70),
)
def test_sparse_support_holds_the_likeliest_tokens_exactly_in_fp16(logits, size):
    probs = torch.tensor(logits, dtype=torch.float64).softmax(-1)
    token_ids, weights = (support[0] for support in sparse_support(probs[None], size))
    assert weights.tolist() == sorted(weights.tolist(), reverse=True)
    token_ids, weights = token_ids[weights > 0], weights[weights > 0]
    assert weights.dtype == torch.float64
    assert torch.equal(weights.half().double(), weights)
    assert weights[0] == 1.0
    ranked = sorted(range(len(logits)), key=lambda v: (-logits[v], v))
    expected = [v for v in ranked[:size] if float((probs[v] / probs.max()).half()) > 0]
    assert token_ids.tolist() == expected

    dense = dense_of(token_ids, weights, len(logits))
    assert dense.sum().item() == pytest.approx(1.0, abs=1e-12)
    assert dense[token_ids].tolist() == [w / sum(weights.tolist()) for w in weights.tolist()]
    assert (dense > 0).sum() == len(expected)


def test_a_sparse_distribution_has_the_same_bits_in_any_order():
    generator = torch.Generator().manual_seed(7)
    probs = torch.randn(1, 5000, generator=generator).double().softmax(-1)
    [token_ids], [weights] = sparse_support(probs)
    order = torch.randperm(64, generator=generator)
    shuffled = dense_of(token_ids[order], weights[order], 5000)
    assert torch.equal(dense_of(token_ids, weights, 5000), shuffled)


@pytest.mark.parametrize(
    ("token_ids", "weights"),
    [
        *(([1, 2], bad) for bad in ([1.0, 0.0], [1.0, -0.5], [1.0, math.nan], [math.inf, 1.0], [1.0])),
        *((bad, [1.0, 0.5]) for bad in ([1, 1], [1, 9], [-1, 2])),
        ([], []),
    ],
)
def test_a_malformed_sparse_distribution_is_refused(token_ids, weights):
    with pytest.raises(ValueError, match="sparse distribution"):
        dense_of(torch.tensor(token_ids, dtype=torch.int64), torch.tensor(weights, dtype=torch.float64), 9)


def dense_of(token_ids: Tensor, weights: Tensor, vocab_size: int) -> Tensor:  # [vocab]
    [dense] = dense_from_sparse(
        [SparseDistribution(tuple(token_ids.tolist()), tuple(weights.tolist()))], vocab_size, token_ids.device
    )
    return dense
