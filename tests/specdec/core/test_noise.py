"""Laws of the keyed noise: the published vectors, the distribution, independence in every part of the key."""

from __future__ import annotations

import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from specdec.core.noise import Domain, Key, derive_seed, exponentials, exponentials_at, exponentials_of, uniforms
from specdec.core.philox import philox, philox_array
from specdec.core.sequence import Draw, SamplingParams
from tests.models.backends import BACKENDS, backend

# Salmon et al., Random123, kat_vectors: philox 4x32 10
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEED = 0x0123456789ABCDEF


def keys(positions, base=0, seed=SEED):
    return [Key(seed, position, base) for position in positions]


def reference_philox(counter: tuple[int, ...], key: tuple[int, ...]) -> tuple[int, ...]:
    """The paper's own wording, in unsigned integers of any size."""
    word_0, word_1, word_2, word_3 = counter
    key_0, key_1 = key
    for _ in range(10):
        product_0, product_1 = 0xD2511F53 * word_0, 0xCD9E8D57 * word_2
        word_0, word_1, word_2, word_3 = (
            (product_1 >> 32) ^ word_1 ^ key_0,
            product_1 % 2**32,
            (product_0 >> 32) ^ word_3 ^ key_1,
            product_0 % 2**32,
        )
        key_0, key_1 = (key_0 + 0x9E3779B9) % 2**32, (key_1 + 0xBB67AE85) % 2**32
    return word_0, word_1, word_2, word_3


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_vectors(counter, key, answer):
    assert reference_philox(counter, key) == answer
    assert philox(counter, key) == answer
    words = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == answer


word = st.integers(0, 2**32 - 1)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(word, word, word, word, word, word), min_size=1, max_size=5))
def test_ints_tensors_and_arrays_give_the_same_bits(rows):
    for row in rows:
        counter, key = row[:4], row[4:]
        expected = reference_philox(counter, key)
        assert philox(counter, key) == expected
        assert tuple(int(w) for w in philox(tuple(torch.tensor(w) for w in counter), key)) == expected
    columns = np.array(rows, dtype=np.uint64).T
    words = philox_array(tuple(columns[:4]), (columns[4], columns[5]))
    assert [tuple(column) for column in words.T.tolist()] == [reference_philox(row[:4], row[4:]) for row in rows]
    # Broadcast, as rows of many keys are drawn.
    words = philox_array((columns[0][:, None], 5, columns[2][None], 7), (columns[4][:, None], columns[5][:, None]))
    for i, row in enumerate(rows):
        for j, other in enumerate(rows):
            assert tuple(words[:, i, j].tolist()) == reference_philox((row[0], 5, other[2], 7), row[4:])


@pytest.mark.parametrize("domain", list(Domain))
def test_layout_of_key_and_counter_is_as_documented(domain):
    positions, base, vocab_size = [0, 5, 2**31 + 3], 17, 11  # coupled noise ignores the base
    draws = exponentials(keys(positions, base), domain, vocab_size)
    assert draws.shape == (3, vocab_size)
    assert draws.dtype == torch.float64
    first = uniforms(keys(positions, base), domain)
    for row, position in enumerate(positions):
        for token_id in range(vocab_size):
            counter = (position, 0 if domain is Domain.COUPLED else base, token_id // 4, int(domain))
            bits = reference_philox(counter, (SEED % 2**32, SEED >> 32))[token_id % 4]
            uniform = (bits + 0.5) / 2**32
            assert draws[row, token_id].item() == pytest.approx(-np.log1p(-uniform), rel=1e-14)
            if token_id == 0:
                assert first[row].item() == uniform


@settings(max_examples=50, deadline=None)
@given(
    seed=st.integers(0, 2**64 - 1),
    position=st.integers(0, 2**32 - 1),
    base=st.integers(0, 2**32 - 1),
    domain=st.sampled_from(Domain),
    token_ids=st.lists(st.integers(0, 1002), max_size=80),
)
def test_a_small_support_has_the_bits_of_the_full_row(seed, position, base, domain, token_ids):
    index = torch.tensor(token_ids, dtype=torch.int64)
    two = [Key(SEED, 3, 1), Key(seed, position, base)]
    drawn = exponentials(two, domain, 1003)
    for row in range(2):
        rows = torch.full_like(index, row)
        assert torch.equal(exponentials_at(two, rows, index, domain), drawn[row, index])


def test_rows_do_not_depend_on_their_neighbours():
    block = exponentials(keys(range(9)), Domain.COUPLED, 4099)
    for position in range(9):
        assert torch.equal(exponentials(keys([position], 0), Domain.COUPLED, 4099)[0], block[position])
    # Also with other sequences' rows around it, and when several chunks are drawn.
    mixed = [Key(seed, 7 * seed + 1, 3) for seed in range(70)]
    rows = exponentials(mixed, Domain.DRAFT, 4099)
    for row in (0, 15, 16, 17, 69):
        assert torch.equal(exponentials([mixed[row]], Domain.DRAFT, 4099)[0], rows[row])
    # A shorter vocabulary is a prefix of a longer one, so draft and target may pad theirs differently.
    assert torch.equal(exponentials(keys(range(9)), Domain.COUPLED, 513), block[:, :513])


def test_empty_requests_give_empty_tensors():
    assert exponentials([], Domain.DRAFT, 7).shape == (0, 7)
    assert exponentials(keys([3], 0), Domain.DRAFT, 0).shape == (1, 0)
    assert uniforms([], Domain.ACCEPT).shape == (0,)
    none = torch.tensor([], dtype=torch.int64)
    assert exponentials_at(keys([3]), none, none, Domain.DRAFT).shape == (0,)


def test_uniforms_are_uniform():
    draws = uniforms(keys(range(60_000), 1), Domain.ACCEPT).numpy()
    assert draws.min() > 0.0
    assert draws.max() < 1.0
    assert stats.kstest(draws, "uniform").pvalue > 1e-4
    counts = np.histogram(draws, bins=500, range=(0.0, 1.0))[0]
    assert stats.chisquare(counts).pvalue > 1e-4


def test_exponentials_are_exponential_in_every_lane():
    draws = exponentials(keys(range(50)), Domain.COUPLED, 4096).numpy()
    assert np.isfinite(draws).all()
    assert draws.min() > 0.0
    for lane in range(4):
        assert stats.kstest(draws[:, lane::4].ravel(), "expon").pvalue > 1e-4


def test_extreme_bits_stay_finite():
    """The first positions of seed 0 with a word of 0 and of 2**32 - 1. Neither log(0) nor log1p(-1) can occur."""
    lowest = exponentials(keys([1_498_094_372], seed=0), Domain.COUPLED, 4)[0, 3].item()
    highest = exponentials(keys([1_538_303_059], seed=0), Domain.COUPLED, 4)[0, 1].item()
    assert lowest == pytest.approx(2.0**-33)
    assert highest == pytest.approx(33 * np.log(2))


def numbers(seed=SEED, position=7, base=40, domain=Domain.DRAFT):
    return exponentials(keys([position], base, seed), domain, 20_000)[0]


NEIGHBOURS = {
    "seed": lambda: [numbers(seed=s) for s in (0, 1, 1 << 32, 2**64 - 1)],
    "position": lambda: [numbers(position=p) for p in (0, 1, 2, 41)],
    "base": lambda: [numbers(base=b) for b in (0, 1, 7, 41)],
    "domain": lambda: [numbers(domain=d, base=0) for d in Domain],
    "sample": lambda: [numbers(seed=derive_seed(SEED, i)) for i in range(4)],
    "token": lambda: [numbers()[shift : shift + 19_000] for shift in (0, 1, 2, 3, 4, 8)],
}


@pytest.mark.parametrize("part", NEIGHBOURS)
def test_numbers_with_different_keys_are_independent(part):
    rows = [stats.expon.cdf(row.numpy()) for row in NEIGHBOURS[part]()]
    for row, other in pairwise(rows):
        correlation = np.corrcoef(row, other)[0, 1]
        assert abs(correlation) < 4.5 / np.sqrt(len(row))
        joint = np.histogram2d(row, other, bins=10, range=[[0.0, 1.0]] * 2)[0]
        assert stats.chisquare(joint.ravel()).pvalue > 1e-5


def test_sample_seeds_are_distinct_need_no_torch_and_the_first_is_the_requests_own(monkeypatch):
    assert derive_seed(SEED, 0) == SEED
    seeds = {derive_seed(seed, index) for seed in (0, 1, SEED) for index in range(500)}
    assert len(seeds) == 1500
    assert all(0 <= seed < 2**64 for seed in seeds)
    low, high, _, _ = reference_philox((3, 0, 0, 4), (SEED % 2**32, SEED >> 32))
    for name in ("torch", "numpy"):  # where orchestrators derive them
        monkeypatch.setitem(sys.modules, name, None)
    assert derive_seed(SEED, 3) == low + (high << 32)


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match="64-bit"):
        exponentials(keys([0], seed=seed), Domain.COUPLED, 4)
    with pytest.raises(ValueError, match="64-bit"):
        derive_seed(seed, 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cpu_and_gpu_agree():
    on_cpu = exponentials(keys(range(5)), Domain.COUPLED, 4099)
    on_gpu = exponentials(keys(range(5)), Domain.COUPLED, 4099, device="cuda").cpu()
    # The words agree bit for bit; the two log1p may differ in the last place.
    torch.testing.assert_close(on_gpu, on_cpu, rtol=1e-15, atol=0.0)


@pytest.mark.parametrize("name", BACKENDS)
def test_a_position_before_the_text_has_no_noise(name: str) -> None:
    for key in (Key(SEED, -1), Key(SEED, -(2**32))):
        with pytest.raises(ValueError, match="position must be 0 or more"):
            exponentials([Key(SEED, 3), key], Domain.COUPLED, 8)
        with pytest.raises(ValueError, match="position must be 0 or more"):
            exponentials_of(key, Domain.COUPLED, [1])
        with pytest.raises(ValueError, match="position must be 0 or more"):
            backend(name).draw(torch.zeros(1, 4096), [Draw(SamplingParams(1.0), *key[:2])])
