"""Laws of verification, by full enumeration (exact_law), and its edges."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.core.noise import Domain, Key, exponentials, uniforms
from specdec.core.tree import SparseDistribution
from specdec.sampling.distributions import dense_from_sparse, race, sparse_support
from specdec.speculation.verification import descend, verify_block, verify_token
from tests.specdec.speculation.exact_law import (
    BOTH,
    TOLERANCE,
    constant_pair,
    error,
    of_one,
    output_law,
    random_pair,
    random_row,
)

SHAPES = [(2, 0), (2, 1), (5, 1), (2, 2), (3, 2), (5, 2), (2, 3), (3, 3)]


@BOTH
@pytest.mark.parametrize(("vocab_size", "num_draft_tokens"), SHAPES)
def test_output_follows_target_distribution(verify, vocab_size, num_draft_tokens):
    assert error(verify, random_pair(17, vocab_size, num_draft_tokens)) < TOLERANCE


@BOTH
@settings(max_examples=12, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10**6),
    vocab_size=st.integers(2, 3),
    num_draft_tokens=st.integers(1, 2),
    target_kind=st.sampled_from(["dense", "sparse", "one-hot"]),
    draft_kind=st.sampled_from(["dense", "sparse", "one-hot"]),
)
def test_output_follows_target_where_mass_is_missing(
    verify, seed, vocab_size, num_draft_tokens, target_kind, draft_kind
):
    pair = random_pair(seed, vocab_size, num_draft_tokens, target_kind, draft_kind)
    assert error(verify, pair) < TOLERANCE


@BOTH
def test_output_follows_target_for_the_sparse_draft_that_was_sampled_from(verify):
    pair = random_pair(23, 5, 2)
    for prefix, row in pair.draft.items():
        [token_ids], [weights] = (each.tolist() for each in sparse_support(torch.tensor(row)[None], 2))
        size = sum(weight > 0 for weight in weights)
        sparse = SparseDistribution(tuple(token_ids[:size]), tuple(weights[:size]))
        [pair.draft[prefix]] = dense_from_sparse([sparse], 5, torch.device("cpu")).numpy()
    assert error(verify, pair) < TOLERANCE


@pytest.mark.parametrize("seed", range(3))
def test_block_accepts_at_least_as_many_as_token(seed):
    pair = random_pair(seed, *[(3, 2), (2, 3), (4, 2)][seed])
    token, block = (output_law(of_one(verify), pair)[1] for verify in (verify_token, verify_block))
    assert block >= token - TOLERANCE


def test_expected_accepted_tokens_of_the_papers_example():
    pair = constant_pair([1 / 3, 2 / 3], [2 / 3, 1 / 3], 2)
    assert output_law(of_one(verify_token), pair)[1] == pytest.approx(10 / 9, abs=TOLERANCE)
    assert output_law(of_one(verify_block), pair)[1] == pytest.approx(11 / 9, abs=TOLERANCE)


@BOTH
def test_one_token_is_accepted_with_probability_one_minus_distance(verify):
    pair = random_pair(31, 5, 1)
    distance = 0.5 * np.abs(pair.target[()] - pair.draft[()]).sum()
    assert output_law(verify, pair)[1] == pytest.approx(1.0 - distance, abs=TOLERANCE)


def probs(*rows: list[float]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@BOTH
def test_no_draft_gives_the_targets_own_distribution(verify):
    target = probs([0.2, 0.5, 0.3])
    nothing = torch.zeros(0, 3, dtype=torch.float64)
    accepted, row = verify(target, nothing, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    assert accepted == 0
    assert torch.equal(row, target[0])


uniform = st.integers(0, 2**32 - 1).map(lambda word: (word + 0.5) / 2**32)


@BOTH
@settings(max_examples=60, deadline=None)
@given(data=st.data(), seed=st.integers(0, 10**6), num_draft_tokens=st.integers(1, 6))
def test_identical_models_accept_everything_and_disjoint_ones_nothing(verify, data, seed, num_draft_tokens):
    rng = np.random.default_rng(seed)
    drawn = data.draw(st.lists(uniform, min_size=num_draft_tokens, max_size=num_draft_tokens))
    uniforms = torch.tensor(drawn, dtype=torch.float64)
    target = torch.tensor(np.array([random_row(rng, 6, "dense") for _ in range(num_draft_tokens + 1)]))
    token_ids = torch.tensor(rng.integers(6, size=num_draft_tokens))
    accepted, row = verify(target, target[:-1], token_ids, uniforms)
    assert accepted == num_draft_tokens
    assert torch.equal(row, target[-1])
    target = probs(*[[0.0, 0.0, 0.4, 0.6]] * (num_draft_tokens + 1))
    draft = probs(*[[0.7, 0.3, 0.0, 0.0]] * num_draft_tokens)
    accepted, row = verify(target, draft, token_ids % 2, uniforms)
    assert accepted == 0
    torch.testing.assert_close(row, target[0], rtol=1e-15, atol=0.0)


@BOTH
@settings(max_examples=100, deadline=None)
@given(
    data=st.data(),
    seed=st.integers(0, 10**6),
    num_draft_tokens=st.integers(0, 5),
    kind=st.sampled_from(["dense", "sparse", "one-hot"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_the_answer_always_has_mass_and_only_on_what_the_target_allows(
    verify, data, seed, num_draft_tokens, kind, dtype
):
    rng = np.random.default_rng(seed)
    target = torch.tensor(np.array([random_row(rng, 5, kind) for _ in range(num_draft_tokens + 1)]))
    draft = torch.tensor(np.array([random_row(rng, 5, kind) for _ in range(num_draft_tokens)])).reshape(-1, 5)
    token_ids = draft.argmax(-1) if num_draft_tokens else torch.zeros(0, dtype=torch.int64)
    drawn = data.draw(st.lists(uniform, min_size=num_draft_tokens, max_size=num_draft_tokens))
    accepted, row = verify(target.to(dtype), draft.to(dtype), token_ids, torch.tensor(drawn, dtype=torch.float64))
    assert 0 <= accepted <= num_draft_tokens
    assert row.dtype == torch.float64
    assert (row >= 0).all()
    assert row.sum() > 0
    assert (row[target[accepted] == 0] == 0).all()
    # An accepted token is one the target could have drawn itself.
    assert all(target[i, token_ids[i]] > 0 for i in range(accepted))


@BOTH
def test_a_token_without_probability_and_a_wrong_number_of_uniforms_are_refused(verify):
    target = probs([0.5, 0.5], [0.5, 0.5])
    with pytest.raises(ValueError, match="no probability"):
        verify(target, probs([1.0, 0.0]), torch.tensor([1]), torch.tensor([0.5]))
    for wrong in ([], [0.1, 0.1]):
        with pytest.raises(ValueError, match="numbers for 1 nodes"):
            verify(target, target[:1], torch.tensor([1]), torch.tensor(wrong))


@BOTH
def test_after_a_rejection_that_leaves_no_mass_the_targets_row_is_drawn_from(verify):
    """Only rounding leads there. Here it is so coarse that the draft has more of every token."""
    target, draft = probs([0.3, 0.3], [0.5, 0.5]), probs([0.5, 0.5])
    accepted, row = verify(target, draft, torch.tensor([0]), torch.tensor([0.9]))
    assert accepted == 0
    assert torch.equal(row, target[0])


@BOTH
def test_a_vanishing_draft_probability_does_not_revive_a_dead_path(verify):
    # 0 * (0.5 / 5e-324) is 0 * inf: the first token is impossible for the target, so nothing is accepted.
    target, draft = probs([0.0, 1.0], [0.5, 0.5], [0.5, 0.5]), probs([1.0, 0.0], [1.0, 5e-324])
    accepted, row = verify(target, draft, torch.tensor([0, 1]), torch.tensor([0.5, 2.0**-33]))
    assert accepted == 0
    assert row.tolist() == [0.0, 1.0]


@pytest.mark.slow
@BOTH
def test_drawn_with_keyed_noise_the_first_token_follows_the_target(verify):
    """The recipe as callers use it: draft, accept and correction from their own domains."""
    pair = random_pair(5, 3, 2)
    counts = np.zeros(3)
    for seed in range(1000):
        drafted: tuple[int, ...] = ()
        for i in range(2):
            noise = exponentials([Key(seed, 9 + i, 9)], Domain.DRAFT, 3)
            drafted += (int(race(torch.tensor(pair.draft[drafted]).log()[None], noise)[0]),)
        accepted, row = verify(
            pair.rows(pair.target, drafted, 3),
            pair.rows(pair.draft, drafted, 2),
            torch.tensor(drafted),
            uniforms([Key(seed, 9, 9), Key(seed, 10, 9)], Domain.ACCEPT),
        )
        following = race(row.log()[None], exponentials([Key(seed, 9 + accepted, 9)], Domain.CORRECTION, 3))
        counts[drafted[0] if accepted else int(following[0])] += 1
    expected = 1000 * pair.target[()]
    assert ((counts - expected) ** 2 / expected).sum() < 18.4  # chi-square, 2 degrees of freedom, p = 1e-4


@pytest.mark.parametrize("verify", [verify_token, verify_block])
@pytest.mark.parametrize("vocab_size", [7, 40_000])  # torch sums a row of 40,000 numbers with several threads
def test_a_chain_has_the_same_result_in_any_company(verify, vocab_size):
    generator = torch.Generator().manual_seed(3)
    num_nodes = [2, 0, 1, 5, 0, 3, 2]
    chains = []
    for num in num_nodes:
        target = torch.rand(num + 1, vocab_size, generator=generator).double().pow(4)
        draft = target[:-1] * torch.rand(num, vocab_size, generator=generator).double()
        token_ids = torch.randint(vocab_size, (num,), generator=generator).tolist()
        rows = target / target.sum(-1, keepdim=True), draft / draft.sum(-1, keepdim=True)
        chains.append((*rows, token_ids, torch.rand(num, generator=generator).double()))
    alone = [verify(*chain, [num]) for chain, num in zip(chains, num_nodes, strict=True)]
    together = verify(
        *(torch.cat([chain[i] for chain in chains]) for i in (0, 1)),
        [token for *_, token_ids, _ in chains for token in token_ids],
        torch.cat([uniforms for *_, uniforms in chains]),
        num_nodes,
    )
    assert together[0] == [num for [num], _ in alone]
    assert torch.equal(together[1], torch.cat([weights for _, weights in alone]))
    assert 0 < sum(together[0]) < sum(num_nodes)


def test_descend_follows_the_targets_tokens_and_stops_where_the_tree_does():
    #        root
    #   5: 0      6: 1
    #  7: 2  8: 3   7: 4
    token_ids, parents = [5, 6, 7, 8, 7], [-1, -1, 0, 0, 1]
    assert descend(token_ids, parents, [5, 8, 0, 0, 9, 0]) == ([0, 3], 9)
    assert descend(token_ids, parents, [6, 0, 7, 0, 0, 1]) == ([1, 4], 1)
    assert descend(token_ids, parents, [6, 0, 5, 0, 0, 1]) == ([1], 5)
    assert descend(token_ids, parents, [7, 8, 7, 0, 0, 1]) == ([], 7)
    assert descend([], [], [3]) == ([], 3)


@settings(max_examples=100, deadline=None)
@given(data=st.data(), num_nodes=st.integers(0, 12))
def test_descend_gives_a_prefix_of_what_the_target_says_alone(data, num_nodes):
    """The target is a function of the prefix; whatever the tree, the text is the target's."""
    prefixes: list[tuple[int, ...]] = []
    parents: list[int] = []
    for node in range(num_nodes):
        parent = data.draw(st.integers(-1, node - 1))
        prefix = (*(prefixes[parent] if parent >= 0 else ()), data.draw(st.integers(0, 2)))
        if prefix not in prefixes:  # no twins
            prefixes.append(prefix)
            parents.append(parent)
        else:
            return

    def said_after(prefix: tuple[int, ...]) -> int:
        return (7 * len(prefix) + 5 * sum(prefix)) % 3

    target_tokens = [said_after(()), *(said_after(prefix) for prefix in prefixes)]
    accepted, token = descend([prefix[-1] for prefix in prefixes], parents, target_tokens)
    alone: tuple[int, ...] = ()
    while len(alone) <= len(accepted):
        alone += (said_after(alone),)
    assert (*(prefixes[node][-1] for node in accepted), token) == alone
    assert alone not in prefixes  # it went as far as it could
