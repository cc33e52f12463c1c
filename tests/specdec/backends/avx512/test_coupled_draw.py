"""The kernel draws the same tokens as torch, whatever the row and its parameters."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from specdec.backends.avx512 import coupled_draw
from specdec.core.noise import Key
from specdec.core.sequence import Draw, SamplingParams
from specdec.sampling.distributions import most_likely_draws, sample_coupled
from specdec.sampling.noise_cache import KeptRows, PassNoise
from tests.models.backends import AVX512_ONLY, BACKENDS, backend
from tests.specdec.backends.avx512.common_layers import threads_for_passes

pytestmark = AVX512_ONLY


def by_torch(logits: Tensor, draws: list[Draw]) -> list[int]:
    keys = [Key(draw.seed, draw.position) for draw in draws]
    noise = PassNoise(keys, logits.shape[1], logits.device, KeptRows())
    return sample_coupled(logits, [draw.sampling for draw in draws], noise).tolist()


def by_c(logits: Tensor, draws: list[Draw]) -> list[int]:
    return coupled_draw.coupled_draw(logits, draws).tolist()


def some_sampling(rng: random.Random) -> SamplingParams:
    """No number of equal tokens has exactly the mass top_p, where torch and C round differently."""
    return SamplingParams(
        rng.choice([0.0, 0.001, 0.1, 0.5, 1.0, 2.0, 100.0]),
        top_k=rng.choice([0, 0, 1, 2, 5, 50, 1000]),
        top_p=rng.choice([1.0, 1.0, 0.010007, 0.30371, 0.90137, 0.95173, 0.999999]),
        min_p=rng.choice([0.0, 0.0, 0.05, 0.5, 1.0]),
    )


def some_draws(rng: random.Random, num_rows: int) -> list[Draw]:
    return [Draw(some_sampling(rng), rng.getrandbits(64), rng.randrange(1 << 31)) for _ in range(num_rows)]


def some_logits(rng: random.Random, num_rows: int, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Flat or steep, some with many equals, as a part of longer rows."""
    generator = torch.Generator().manual_seed(rng.getrandbits(32))
    rows = torch.randn(num_rows, vocab_size + 3, generator=generator) * rng.choice([0.0, 0.01, 0.3, 1.0, 4.0, 20.0])
    if rng.random() < 0.3:
        out = torch.rand(rows.shape, generator=generator) < rng.choice([0.1, 0.9])
        out[:, rng.randrange(vocab_size)] = False
        rows = rows.masked_fill(out, -torch.inf)
    return rows.to(dtype)[:, :vocab_size]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("vocab_size", [1, 3, 16, 63, 64, 65, 257, 1000, 4099])
def test_the_same_tokens_are_drawn(vocab_size: int, dtype: torch.dtype) -> None:
    rng = random.Random(vocab_size)
    for _ in range(40):
        logits = some_logits(rng, rng.randint(1, 4), vocab_size, dtype)
        draws = some_draws(rng, len(logits))
        assert by_c(logits, draws) == by_torch(logits, draws), draws


def test_the_same_tokens_are_drawn_from_a_large_vocabulary_and_no_order_of_its_logits_takes_long() -> None:
    """It takes ten minutes if the pivot is one of the ends or in the middle."""
    logits = some_logits(random.Random(4), 6, 151_936, torch.bfloat16)
    for temperature, top_p in ((1.0, 1.0), (0.8, 0.95), (3.0, 0.5)):
        draws = [Draw(SamplingParams(temperature, top_p=top_p), seed, seed) for seed in range(6)]
        assert by_c(logits, draws) == by_torch(logits, draws)
    num = 1_000_000
    valley = (torch.arange(num, dtype=torch.float32) - num / 2).abs() / num
    draws = [Draw(SamplingParams(t, top_p=0.9), 3, row) for row, t in enumerate((1.0, 0.5))]
    assert by_c(torch.stack([valley, -valley]), draws) == by_torch(torch.stack([valley, -valley]), draws)


@pytest.mark.parametrize("vocab_size", [1, 5, 64, 1000])
def test_runners_up_are_those_of_torch(vocab_size: int) -> None:
    rng = random.Random(vocab_size)
    for _ in range(60):
        logits = some_logits(rng, rng.randint(1, 4), vocab_size, torch.float32)
        draws = [Draw(SamplingParams(draw.sampling.temperature), *draw[1:]) for draw in some_draws(rng, len(logits))]
        count = min(vocab_size, rng.choice([1, 2, 8]))
        keys = [Key(draw.seed, draw.position) for draw in draws]
        noise = PassNoise(keys, vocab_size, logits.device, KeptRows())
        every, of_every = most_likely_draws(logits, [draw.sampling for draw in draws], noise, count=vocab_size)
        by_token = torch.empty_like(of_every).scatter_(-1, every, of_every)
        expected_scores, expected = (
            column[:, :count] for column in by_token.sort(dim=-1, descending=True, stable=True)
        )
        tokens, scores = coupled_draw.leaders(logits, draws, count)
        likely = expected_scores > expected_scores[:, :1] - 80  # the others have no chance
        assert bool(likely[:, 0].all())
        assert torch.allclose(scores[likely], expected_scores[likely], rtol=1e-12)
        assert torch.equal(tokens[likely], expected[likely])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_first_leader_stands_in_for_missing_ones(temperature: float) -> None:
    logits = torch.full((1, 40), -torch.inf)
    logits[0, [7, 30]] = torch.tensor([1.0, 30.0])
    tokens, _ = coupled_draw.leaders(logits, [Draw(SamplingParams(temperature), 1, 1)], 4)
    assert tokens.tolist() == [[30, 7, 30, 30]]


def test_a_draw_depends_on_its_row_alone_and_not_on_company_or_threads() -> None:
    rng = random.Random(5)
    logits = some_logits(rng, 12, 1000, torch.bfloat16)
    draws = some_draws(rng, 12)
    alone = [by_c(logits[row : row + 1], draws[row : row + 1])[0] for row in range(12)]
    for threads in (1, 2, 5):
        with threads_for_passes(threads):
            assert by_c(logits, draws) == alone
    assert by_c(logits[:0], []) == []


def test_a_token_with_a_logit_of_minus_infinity_is_never_drawn_and_nan_does_no_harm() -> None:
    logits = torch.full((1, 100), -torch.inf)
    logits[0, 77] = -3.0
    for sampling in (SamplingParams(0.0), SamplingParams(1.0), SamplingParams(1.0, top_k=5, top_p=0.9, min_p=0.1)):
        assert by_c(logits, [Draw(sampling, 1, 2)]) == [77]
        for wrong in (torch.nan, torch.inf, -torch.inf):
            assert 0 <= by_c(torch.full((1, 100), wrong), [Draw(sampling, 1, 2)])[0] < 100


@pytest.mark.parametrize(
    ("logits", "taken"),
    [
        (torch.zeros(2, 8, dtype=torch.float64), False),
        (torch.zeros(2, 8, dtype=torch.float16), False),
        (torch.zeros(2, 16)[:, ::2], False),
        (torch.zeros(8), False),
        (torch.zeros(2, 16)[:, :8], True),
    ],
)
def test_rows_of_another_kind_are_left_to_torch(logits: Tensor, taken: bool) -> None:
    assert coupled_draw.takes(logits) is taken


@pytest.mark.parametrize("name", BACKENDS)
def test_leaders_of_a_part_of_the_vocabulary_have_the_noise_of_their_tokens(name: str) -> None:
    rng, generator = random.Random(3), torch.Generator().manual_seed(3)
    for size, count in ((200, 4), (3, 4)):
        ids = torch.tensor(rng.sample(range(1000), size))
        logits = torch.randn(5, size, generator=generator) * 3
        draws = [Draw(SamplingParams(temperature, top_k=1), rng.randrange(99), 7) for temperature in (0, 0.5, 1, 2, 0)]
        whole = torch.full((5, 1000), -torch.inf).index_copy_(1, ids, logits)
        expected, expected_scores = backend("torch").leaders(whole, draws, min(count, size))
        tokens, scores = backend(name).leaders(logits, draws, count, ids)
        assert torch.equal(tokens, expected)
        assert torch.allclose(scores, expected_scores, rtol=1e-12)
