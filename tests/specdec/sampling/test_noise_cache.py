"""Rows of noise that are kept from pass to pass."""

from __future__ import annotations

import torch

from specdec.backends.torch.draw import TorchDraw
from specdec.core.noise import Domain, Key, exponentials
from specdec.core.sequence import Draw, SamplingParams
from specdec.sampling.noise_cache import MAX_KEPT_ROWS, KeptRows, PassNoise

VOCAB = 40
CPU = torch.device("cpu")


def test_a_kept_row_holds_the_memory_of_no_other() -> None:
    keys = [Key(seed, 5) for seed in range(9)]
    kept = KeptRows()
    drawn = PassNoise(keys, VOCAB, CPU, kept).rows(range(9))
    for row, key in zip(drawn, keys, strict=True):
        kept_row = kept.get(key)
        assert kept_row is not None
        assert torch.equal(kept_row, row)
        assert kept_row.untyped_storage().nbytes() == VOCAB * 8


def test_kept_rows_are_those_that_were_drawn() -> None:
    kept = KeptRows()
    keys = [Key(3, position) for position in (5, 6, 7)]
    first = PassNoise(keys[:2], VOCAB, CPU, kept).rows([0, 1])
    second = PassNoise(keys[1:], VOCAB, CPU, kept).rows([0, 1])
    assert torch.equal(torch.cat([first, second[1:]]), exponentials(keys, Domain.COUPLED, VOCAB))
    assert torch.equal(first[1], second[0])


def test_the_rows_used_last_are_kept_and_others_are_drawn_again_with_the_same_bits() -> None:
    kept = KeptRows(3)
    keys = [Key(3, position) for position in range(5)]
    every = exponentials(keys, Domain.COUPLED, VOCAB)
    for rows in ([0, 1, 2], [0], [3], [0, 3, 1], [4, 3, 2, 1, 0], [0, 1, 2, 3, 4]):
        assert torch.equal(PassNoise(keys, VOCAB, CPU, kept).rows(rows), every[rows])
        assert len(kept) <= 3
    PassNoise(keys, VOCAB, CPU, kept).rows([2])
    assert kept.get(keys[2]) is not None
    assert kept.get(keys[0]) is None


def test_a_model_keeps_no_more_rows_than_its_memory_plan_counts() -> None:
    """A long text that was only ranked once kept a row for each of its positions."""
    model, logits = TorchDraw(1 << 18), torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    alone, beside = [], []
    for seed in range(2):
        fresh = TorchDraw(1 << 18)
        for position in range(MAX_KEPT_ROWS):
            draws = [Draw(SamplingParams(), seed, position)]
            for by, drawn in ((model, beside), (fresh, alone)):
                drawn += [*by.draw(logits, draws), *by.leaders(logits, draws, 3)[0]]
    assert len(model._kept) == MAX_KEPT_ROWS
    assert all(torch.equal(one, other) for one, other in zip(alone, beside, strict=True))
