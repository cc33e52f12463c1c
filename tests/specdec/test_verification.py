"""Laws of verification, by full enumeration: every draft, every accept decision, every continuation.

`output_law` treats a verifier as a black box: it finds by bisection where the answer changes with each accept
uniform and sums over the cells between. So the joint law of the output is exact, and the planted mutants at
the end go through the same check as the real functions.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec import verification
from specdec.noise import Domain, Key, exponentials, uniforms
from specdec.sampling import dense_from_sparse, race, sparse_support
from specdec.verification import descend, verify_block, verify_token

Verifier = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[int, Tensor]]
BOTH = pytest.mark.parametrize("verify", [verify_token, verify_block])
TOLERANCE = 1e-9


# --- the check ------------------------------------------------------------------------------------


@dataclass
class Pair:
    """Two language models as tables: the next-token distribution after every prefix of up to K tokens."""

    vocab_size: int
    num_draft_tokens: int
    target: dict[tuple[int, ...], np.ndarray]
    draft: dict[tuple[int, ...], np.ndarray]

    def rows(self, model: dict[tuple[int, ...], np.ndarray], path: tuple[int, ...], num_rows: int) -> Tensor:
        if num_rows == 0:
            return torch.zeros(0, self.vocab_size, dtype=torch.float64)
        return torch.tensor(np.array([model[path[:i]] for i in range(num_rows)]))

    def paths(self, length: int) -> Iterator[tuple[int, ...]]:
        return itertools.product(range(self.vocab_size), repeat=length)

    def law(self, model: dict[tuple[int, ...], np.ndarray], path: tuple[int, ...], start: int = 0) -> float:
        return float(np.prod([model[path[:i]][path[i]] for i in range(start, len(path))]))


def random_row(rng: np.random.Generator, vocab_size: int, kind: str) -> np.ndarray:
    row = rng.dirichlet(np.full(vocab_size, 0.7))
    if kind == "sparse":  # zero mass here and there
        row[rng.random(vocab_size) < 0.4] = 0.0
        row[rng.integers(vocab_size)] += 0.1
    if kind == "one-hot":
        row = np.eye(vocab_size)[rng.integers(vocab_size)]
    return row / row.sum()


def random_pair(
    seed: int, vocab_size: int, num_draft_tokens: int, target_kind: str = "dense", draft_kind: str = "dense"
) -> Pair:
    """Every row depends on its whole prefix, so that an answer from the wrong row shows."""
    rng = np.random.default_rng(seed)
    pair = Pair(vocab_size, num_draft_tokens, {}, {})
    for length in range(num_draft_tokens + 1):
        for prefix in pair.paths(length):
            pair.target[prefix] = random_row(rng, vocab_size, target_kind)
            pair.draft[prefix] = random_row(rng, vocab_size, draft_kind)
    return pair


def constant_pair(target: list[float], draft: list[float], num_draft_tokens: int) -> Pair:
    pair = Pair(len(target), num_draft_tokens, {}, {})
    for length in range(num_draft_tokens + 1):
        for prefix in pair.paths(length):
            pair.target[prefix], pair.draft[prefix] = np.array(target), np.array(draft)
    return pair


ALMOST_ONE = 1.0 - 2.0**-40


def cells(answer: Callable[[list[float]], int], num_uniforms: int) -> Iterator[tuple[float, list[float]]]:
    """Boxes of accept uniforms in which the answer is constant: (volume, a point inside)."""
    edges: list[list[float]] = []
    for i in range(num_uniforms):
        cuts = set()
        for others in itertools.product([0.0, ALMOST_ONE], repeat=num_uniforms - 1):

            def at(uniform: float, i: int = i, others: tuple[float, ...] = others) -> int:
                return answer([*others[:i], uniform, *others[i:]])

            low, high = 0.0, ALMOST_ONE
            if (start := at(low)) == at(high):
                continue
            while high - low > 1e-11:
                middle = 0.5 * (low + high)
                low, high = (middle, high) if at(middle) == start else (low, middle)
            cuts.add(0.5 * (low + high))
        edges.append([0.0, *sorted(cuts), 1.0])
    for box in itertools.product(*(itertools.pairwise(edge) for edge in edges)):
        yield float(np.prod([high - low for low, high in box])), [0.5 * (low + high) for low, high in box]


def output_law(verify: Verifier, pair: Pair) -> tuple[np.ndarray, float]:
    """The joint law of the first K + 1 output tokens, [vocab] * (K + 1), and the expected number accepted.

    After the token that follows the accepted ones the target goes on alone.
    """
    num_draft_tokens = pair.num_draft_tokens
    law = np.zeros([pair.vocab_size] * (num_draft_tokens + 1))
    expected_accepted = 0.0
    for drafted in pair.paths(num_draft_tokens):
        chance = pair.law(pair.draft, drafted)
        if chance == 0.0:
            continue
        target_probs = pair.rows(pair.target, drafted, num_draft_tokens + 1)
        draft_probs = pair.rows(pair.draft, drafted, num_draft_tokens)
        token_ids = torch.tensor(drafted, dtype=torch.int64)

        def answer(point: list[float], rows=(target_probs, draft_probs, token_ids)) -> tuple[int, Tensor]:
            return verify(*rows, torch.tensor(point, dtype=torch.float64))

        for volume, point in cells(lambda point: answer(point)[0], num_draft_tokens):
            num_accepted, next_probs = answer(point)
            assert next_probs.shape == (pair.vocab_size,)
            expected_accepted += chance * volume * num_accepted
            for token, prob in enumerate(next_probs.tolist()):
                emitted = (*drafted[:num_accepted], token)
                for rest in pair.paths(num_draft_tokens - num_accepted):
                    going_on = pair.law(pair.target, emitted + rest, start=len(emitted)) if prob else 0.0
                    law[emitted + rest] += chance * volume * prob * going_on
    return law, expected_accepted


def error(verify: Verifier, pair: Pair) -> float:
    """How far the output is from the target's law: the largest difference over all sequences."""
    law, _ = output_law(verify, pair)
    expected = [pair.law(pair.target, path) for path in pair.paths(pair.num_draft_tokens + 1)]
    return float(np.abs(law.ravel() - np.array(expected)).max())


# --- the laws -------------------------------------------------------------------------------------

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
        token_ids, weights = sparse_support(torch.tensor(row)[None], 2)
        positive = weights > 0
        pair.draft[prefix] = dense_from_sparse(token_ids[positive], weights[positive], 5).numpy()
    assert error(verify, pair) < TOLERANCE


def test_expected_accepted_tokens_of_the_papers_example():
    pair = constant_pair([1 / 3, 2 / 3], [2 / 3, 1 / 3], 2)
    assert output_law(verify_token, pair)[1] == pytest.approx(10 / 9, abs=TOLERANCE)
    assert output_law(verify_block, pair)[1] == pytest.approx(11 / 9, abs=TOLERANCE)


@pytest.mark.parametrize("seed", range(6))
def test_block_accepts_at_least_as_many_as_token(seed):
    pair = random_pair(seed, *[(3, 2), (2, 3), (4, 2)][seed % 3])
    token, block = (output_law(verify, pair)[1] for verify in (verify_token, verify_block))
    assert block >= token - TOLERANCE


@pytest.mark.parametrize("verify", [verify_token, verify_block])
def test_one_token_is_accepted_with_probability_one_minus_distance(verify):
    pair = random_pair(31, 5, 1)
    distance = 0.5 * np.abs(pair.target[()] - pair.draft[()]).sum()
    assert output_law(verify, pair)[1] == pytest.approx(1.0 - distance, abs=TOLERANCE)


# --- edges ----------------------------------------------------------------------------------------


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
@given(data=st.data(), seed=st.integers(0, 10**6), num_draft_tokens=st.integers(0, 6))
def test_identical_models_accept_everything(verify, data, seed, num_draft_tokens):
    rng = np.random.default_rng(seed)
    target = torch.tensor(np.array([random_row(rng, 6, "dense") for _ in range(num_draft_tokens + 1)]))
    token_ids = torch.tensor([int(rng.integers(6)) for _ in range(num_draft_tokens)], dtype=torch.int64)
    drawn = data.draw(st.lists(uniform, min_size=num_draft_tokens, max_size=num_draft_tokens))
    accepted, row = verify(target, target[:-1], token_ids, torch.tensor(drawn, dtype=torch.float64))
    assert accepted == num_draft_tokens
    assert torch.equal(row, target[-1])


@BOTH
@settings(max_examples=60, deadline=None)
@given(data=st.data(), num_draft_tokens=st.integers(1, 4))
def test_disjoint_models_accept_nothing(verify, data, num_draft_tokens):
    target = probs(*[[0.0, 0.0, 0.4, 0.6]] * (num_draft_tokens + 1))
    draft = probs(*[[0.7, 0.3, 0.0, 0.0]] * num_draft_tokens)
    ids = data.draw(st.lists(st.integers(0, 1), min_size=num_draft_tokens, max_size=num_draft_tokens))
    drawn = data.draw(st.lists(uniform, min_size=num_draft_tokens, max_size=num_draft_tokens))
    accepted, row = verify(target, draft, torch.tensor(ids), torch.tensor(drawn, dtype=torch.float64))
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
def test_the_answer_is_always_a_distribution_over_what_the_target_allows(
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
    assert row.sum().item() == pytest.approx(1.0, abs=1e-6)
    assert (row[target[accepted] == 0] == 0).all()
    # An accepted token is one the target could have drawn itself.
    assert all(target[i, token_ids[i]] > 0 for i in range(accepted))


@BOTH
def test_a_token_that_its_distribution_excludes_is_refused(verify):
    target, draft = probs([0.5, 0.5], [0.5, 0.5]), probs([1.0, 0.0])
    with pytest.raises(ValueError, match="no probability"):
        verify(target, draft, torch.tensor([1]), torch.tensor([0.5]))


@BOTH
def test_as_many_uniforms_as_draft_tokens_are_required(verify):
    target, draft = probs([0.5, 0.5], [0.5, 0.5]), probs([0.5, 0.5])
    for wrong in ([], [0.1, 0.1]):
        with pytest.raises(ValueError, match="zip"):
            verify(target, draft, torch.tensor([1]), torch.tensor(wrong))


def test_a_residual_without_mass_is_the_targets_row():
    row = probs([0.1, 0.2, 0.7])[0]
    assert torch.equal(verification._residual(1.0, row, row), row)


@BOTH
def test_a_vanishing_draft_probability_does_not_revive_a_dead_path(verify):
    # 0 * (0.5 / 5e-324) is 0 * inf: the first token is impossible for the target, so nothing is accepted.
    target, draft = probs([0.0, 1.0], [0.5, 0.5], [0.5, 0.5]), probs([1.0, 0.0], [1.0, 5e-324])
    accepted, row = verify(target, draft, torch.tensor([0, 1]), torch.tensor([0.5, 2.0**-33]))
    assert accepted == 0
    assert row.tolist() == [0.0, 1.0]


@BOTH
def test_drawn_with_keyed_noise_the_first_token_follows_the_target(verify):
    """The recipe as callers use it: draft, accept and correction from their own domains."""
    pair = random_pair(5, 3, 2)
    counts = np.zeros(3)
    for seed in range(3000):
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
    expected = 3000 * pair.target[()]
    assert ((counts - expected) ** 2 / expected).sum() < 18.4  # chi-square, 2 degrees of freedom, p = 1e-4


# --- the tree -------------------------------------------------------------------------------------


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


@settings(max_examples=200, deadline=None)
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


# --- planted mutants: the check must see each of them ---------------------------------------------


def rows_off_by_one(verify: Verifier) -> Verifier:
    return lambda target, draft, ids, u: verify(target.roll(-1, 0), draft, ids, u)


def residual_is_target(verify: Verifier) -> Verifier:
    def mutant(target: Tensor, draft: Tensor, ids: Tensor, u: Tensor) -> tuple[int, Tensor]:
        num_accepted, _ = verify(target, draft, ids, u)
        return num_accepted, target[num_accepted]

    return mutant


def cut_by_its_own_content(verify: Verifier) -> Verifier:
    """Keeps a draft token only where the draft was sure of it: looks harmless, and biases."""

    def mutant(target: Tensor, draft: Tensor, ids: Tensor, u: Tensor) -> tuple[int, Tensor]:
        sure = (draft.gather(1, ids[:, None])[:, 0] >= 0.5).long()
        keep = int(sure.cumprod(0).sum())
        return verify(target[: keep + 1], draft[:keep], ids[:keep], u[:keep])

    return mutant


def bonus_from_the_row_before(verify: Verifier) -> Verifier:
    def mutant(target: Tensor, draft: Tensor, ids: Tensor, u: Tensor) -> tuple[int, Tensor]:
        num_accepted, row = verify(target, draft, ids, u)
        return num_accepted, target[num_accepted - 1] if num_accepted == len(ids) else row

    return mutant


MUTANTS = [rows_off_by_one, residual_is_target, cut_by_its_own_content, bonus_from_the_row_before]


@BOTH
@pytest.mark.parametrize("mutate", MUTANTS)
def test_the_check_rejects_a_mutant(verify, mutate):
    pair = random_pair(17, 3, 2)
    assert error(verify, pair) < TOLERANCE
    assert error(mutate(verify), pair) > 1e-3


def inverted_ratio(original):
    return lambda target, draft, ids: [(b, a) for a, b in original(target, draft, ids)]


def scored_by_the_row_after(original):
    return lambda target, draft, ids: original(target.roll(-1, 0), draft, ids)


def ratio_of_logs(original):
    return lambda target, draft, ids: [(a**0.5, b**0.5) for a, b in original(target, draft, ids)]


@BOTH
@pytest.mark.parametrize("mutate", [inverted_ratio, scored_by_the_row_after, ratio_of_logs])
def test_the_check_rejects_a_wrong_ratio(verify, mutate, monkeypatch):
    monkeypatch.setattr(verification, "_scored", mutate(verification._scored))
    assert error(verify, random_pair(17, 3, 2)) > 1e-3


def without_clamp(joint, target, draft):
    difference = (joint * target - draft).abs()
    return difference / difference.sum()


def without_joint(joint, target, draft, original=verification._residual):
    return original(1.0, target, draft)


def test_the_check_rejects_a_wrong_residual(monkeypatch):
    pair = random_pair(17, 3, 2)
    monkeypatch.setattr(verification, "_residual", without_joint)
    assert error(verify_block, pair) > 1e-3
    assert error(verify_token, pair) < TOLERANCE  # there it is 1 anyway
    monkeypatch.setattr(verification, "_residual", without_clamp)
    assert error(verify_block, pair) > 1e-3
    assert error(verify_token, pair) > 1e-3


def test_dropping_unlikely_drafts_gives_the_bias_that_theory_says():
    """target = draft = (.9, .1): dropping what the draft was not sure of lifts P(0) from .9 to .99."""
    pair = constant_pair([0.9, 0.1], [0.9, 0.1], 1)
    for verify in (verify_token, verify_block):
        law, _ = output_law(cut_by_its_own_content(verify), pair)
        assert law.sum(1)[0] == pytest.approx(0.99, abs=TOLERANCE)
