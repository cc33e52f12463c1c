"""Rows of noise that are kept from pass to pass."""

from __future__ import annotations

import torch

from specdec.noise import Domain, Key, exponentials
from specdec.noise_cache import CoupledNoise, PassNoise

VOCAB = 40


def test_a_row_that_is_kept_holds_on_to_no_other() -> None:
    states = [CoupledNoise(seed) for seed in range(9)]
    noise = PassNoise([(state, 5) for state in states], VOCAB, torch.device("cpu"))
    drawn = noise.rows(range(9))
    for row, state in zip(drawn, states, strict=True):
        assert torch.equal(state.rows[5], row)
        assert state.rows[5].untyped_storage().nbytes() == VOCAB * 8


def test_what_is_kept_is_what_was_drawn() -> None:
    state = CoupledNoise(3)
    device = torch.device("cpu")
    first = PassNoise([(state, 5), (state, 6)], VOCAB, device).rows([0, 1])
    second = PassNoise([(state, 6), (state, 7)], VOCAB, device).rows([0, 1])
    keys = [Key(3, position) for position in (5, 6, 7)]
    assert torch.equal(torch.cat([first, second[1:]]), exponentials(keys, Domain.COUPLED, VOCAB))
    assert torch.equal(first[1], second[0])
