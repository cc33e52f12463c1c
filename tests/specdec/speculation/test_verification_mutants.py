"""The check that verification passes (exact_law) must see each of these planted mistakes."""

from __future__ import annotations

import pytest
from torch import Tensor

from specdec.speculation import verification
from specdec.speculation.verification import verify_block, verify_token
from tests.specdec.speculation.exact_law import (
    BOTH,
    TOLERANCE,
    Verifier,
    constant_pair,
    error,
    of_one,
    output_law,
    random_pair,
)


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
    return lambda *arguments: [[(b, a) for a, b in each] for each in original(*arguments)]


def scored_by_the_row_after(original):
    return lambda chains: original(chains._replace(target_probs=chains.target_probs.roll(-1, 0)))


def ratio_of_logs(original):
    return lambda *arguments: [[(a**0.5, b**0.5) for a, b in each] for each in original(*arguments)]


@BOTH
@pytest.mark.parametrize("mutate", [inverted_ratio, scored_by_the_row_after, ratio_of_logs])
def test_the_check_rejects_a_wrong_ratio(verify, mutate, monkeypatch):
    monkeypatch.setattr(verification, "_scored", mutate(verification._scored))
    assert error(verify, random_pair(17, 3, 2)) > 1e-3


def without_clamp(joint, target, draft):
    return (joint * target - draft).abs()


def without_joint(joint, target, draft, original=verification._residual):
    return original(1.0, target, draft)


def test_the_check_rejects_a_wrong_residual(monkeypatch):
    pair = random_pair(17, 3, 2)
    monkeypatch.setattr(verification, "_residual", without_joint)
    assert error(of_one(verify_block), pair) > 1e-3
    assert error(of_one(verify_token), pair) < TOLERANCE  # there it is 1 anyway
    monkeypatch.setattr(verification, "_residual", without_clamp)
    assert error(of_one(verify_block), pair) > 1e-3
    assert error(of_one(verify_token), pair) > 1e-3


def test_dropping_unlikely_drafts_gives_the_bias_that_theory_says():
    """target = draft = (.9, .1): dropping what the draft was not sure of lifts P(0) from .9 to .99."""
    pair = constant_pair([0.9, 0.1], [0.9, 0.1], 1)
    for verify in (of_one(verify_token), of_one(verify_block)):
        law, _ = output_law(cut_by_its_own_content(verify), pair)
        assert law.sum(1)[0] == pytest.approx(0.99, abs=TOLERANCE)
