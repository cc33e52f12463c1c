"""Triton's kernels compute what torch does on a CPU. Without a GPU they run in Triton's interpreter, a second a call.

The interpreter multiplies with numpy, of which a row in another lane of a tile has other last bits. Tests of bits keep
rows in their lanes.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec.backends.cuda import launches
from specdec.backends.cuda.attention import PlannedAttention
from specdec.backends.cuda.memory import PassMemory
from specdec.backends.cuda.plan import ALL, RUN, Plan
from specdec.core.noise import Domain, Key, exponentials
from specdec.core.sequence import Draw, SamplingParams
from specdec.kvcache.block_pool import BlockPool
from specdec.kvcache.store import KvStore
from specdec.passes.rows import PassRows, Segment
from specdec.sampling.distributions import greedy, race

pytest.importorskip("triton", reason="the extra gpu is not installed")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BLOCK, HEAD_DIM, KV_HEADS = 16, 32, 2


class Case:
    """Segments in a pool with random keys and values."""

    def __init__(self, segments: Sequence[Segment], groups: int = 2, dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(len(segments))
        self.rows = PassRows(segments, BLOCK)
        self.store = KvStore(BlockPool(120, BLOCK), DEVICE)
        shapes = (groups * KV_HEADS, KV_HEADS, KV_HEADS)
        self.query, self.key, self.value = (
            torch.randn(len(self.rows), heads, HEAD_DIM, generator=generator).to(DEVICE, dtype) for heads in shapes
        )
        for part in self.store.layer(0, self.key, self.value):
            part.copy_(torch.randn(part.shape, generator=generator))

    def by_kernels(self, plan: Plan | None = None, padded: bool = False, **options: Any) -> Tensor:
        plan = plan or Plan.of(self.rows, BLOCK)
        shape = plan.shape().class_of() if padded else plan.shape()
        memory, pool = PassMemory(shape, DEVICE, BLOCK), self.store.layer(0, self.key, self.value)
        memory.load(plan)
        output = torch.full((shape.rows, *self.query.shape[1:]), torch.nan, dtype=self.query.dtype, device=DEVICE)
        query = torch.full_like(output, torch.nan)
        query[: len(self.query)] = self.query
        launches.store_by_kernel(memory, pool, self.key, self.value)
        settings = dict(scale=HEAD_DIM**-0.5, window=None, softcap=None) | options
        launches.attend_by_kernels(memory, pool, query, output, **settings)
        return output

    def by_torch(self, window: int | None = None, softcap: float | None = None) -> Tensor:
        """In float64, on a CPU."""
        cpu = torch.device("cpu")
        store = KvStore(BlockPool(120, BLOCK), cpu)
        for mine, theirs in zip(
            store.layer(0, self.key.double().cpu(), self.value.double().cpu()),
            self.store.layer(0, self.key, self.value),
            strict=True,
        ):
            mine.copy_(theirs)
        output = self.query.double().cpu()
        tensors = (tensor.double().cpu() for tensor in (self.query, self.key, self.value))
        attention = PlannedAttention(cpu, BLOCK, self.rows)
        attention.attend(store, 0, *tensors, output, HEAD_DIM**-0.5, window, softcap)
        return output


def blocks(rng: random.Random, num: int) -> list[int]:
    return rng.sample(range(120), num)


def segments(rng: random.Random, context: int = 300) -> list[Segment]:
    """A chain after a long context, a tree of two branches, and a prompt."""
    order = blocks(rng, 120)
    tree = Segment([0] * 7, [-1, 0, 0, 1, 2, 3, 4], 70, order[40:50], range(7))
    return [Segment.chain([0] * 5, context, order[:40]), tree, Segment.chain([0] * 2, 0, order[50:51])]


@pytest.mark.parametrize(
    ("context", "groups", "dtype", "options"),
    [
        (300, 2, torch.float32, {}),
        (600, 4, torch.float32, {}),
        (570, 5, torch.float32, {"window": 50}),
        (40, 1, torch.float32, {"softcap": 2.0}),
        (300, 2, torch.bfloat16, {}),
    ],
    ids=str,
)
def test_attention_is_that_of_torch(context: int, groups: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = Case(segments(random.Random(groups), context), groups, dtype)
    output = case.by_kernels(padded=True, **options)
    num_rows = len(case.rows)
    expected = case.by_torch(**options)
    error = (output[:num_rows].double().cpu() - expected).norm() / expected.norm()
    assert error < (1e-6 if dtype is torch.float32 else 0.004)
    assert not output[num_rows:].any(), "padding gets 0"


def test_runs_that_are_combined_have_the_bits_of_one_program() -> None:
    rng = random.Random(5)
    case = Case([Segment.chain([0] * 5, 2 * RUN + 40, blocks(rng, 70))])
    plan = Plan.of(case.rows, BLOCK)
    assert plan.shape().in_runs
    in_runs = case.by_kernels(plan)
    plan.items = [(0, 0, ALL, 1)]
    assert torch.equal(case.by_kernels(plan), in_runs)


def test_a_rows_bits_do_not_depend_on_company_branches_or_the_length_of_its_chunk() -> None:
    rng = random.Random(6)
    chain, tree, prompt = segments(rng)
    case = Case([chain, tree, prompt])
    together = case.by_kernels()
    branch = [0, 1, 3, 5]  # of the tree

    def again(segment: Segment, rows: Sequence[int]) -> Tensor:
        other = Case([segment])
        other.store = case.store
        other.query, other.key, other.value = (part[list(rows)] for part in (case.query, case.key, case.value))
        return other.by_kernels()

    assert torch.equal(again(chain, range(5)), together[:5])
    assert torch.equal(again(Segment.chain([0] * 3, 300, chain.block_table), range(3)), together[:3])
    as_chain = Segment.chain([0] * 4, 70, tree.block_table)  # overwrites the tree's slots
    assert torch.equal(again(as_chain, [5 + row for row in branch]), together[[5 + row for row in branch]])


def test_keys_and_values_are_stored_bit_for_bit_but_nan_and_infinity_as_0() -> None:
    case = Case([Segment.chain([0] * 6, 13, [3, 1])], dtype=torch.bfloat16)
    plan = Plan.of(case.rows, BLOCK)
    numbers = torch.tensor([torch.nan, torch.inf, -torch.inf, -0.0, 3e38], dtype=torch.bfloat16)
    case.key[1, 0, :5] = case.value[2, 1, :5] = numbers
    expected = [part.clone() for part in case.store.layer(0, case.key, case.value)]
    for part, new in zip(expected, (case.key, case.value), strict=True):
        part.flatten(0, 1)[case.rows.slots] = new.where(new.isfinite(), 0)
    memory = PassMemory(plan.shape().class_of(), DEVICE, BLOCK)
    memory.load(plan)
    key = case.key.transpose(0, 1).contiguous().transpose(0, 1)  # another layout
    launches.store_by_kernel(memory, case.store.layer(0, case.key, case.value), key, case.value)
    for part, wanted in zip(case.store.layer(0, case.key, case.value), expected, strict=True):
        assert torch.equal(part.view(torch.int16), wanted.view(torch.int16))


def described(draws: Sequence[Draw]) -> tuple[Tensor, Tensor, Tensor]:
    seeds = torch.tensor([draw.seed - (draw.seed >> 63 << 64) for draw in draws])
    positions = torch.tensor([draw.position for draw in draws])
    temperatures = torch.tensor([draw.sampling.temperature for draw in draws], dtype=torch.float64)
    return seeds.to(DEVICE), positions.to(DEVICE), temperatures.to(DEVICE)


def random_draws(rng: random.Random, num: int) -> list[Draw]:
    return [
        Draw(SamplingParams(rng.choice([0.0, 0.3, 1.0, 2.0])), rng.randrange(2**64), rng.randrange(70_000))
        for _ in range(num)
    ]


def scores_of(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """What tokens are ranked by, in float64."""
    noise = exponentials([Key(draw.seed, draw.position) for draw in draws], Domain.COUPLED, logits.shape[1])
    temperatures = torch.tensor([[draw.sampling.temperature] for draw in draws], dtype=torch.float64)
    raced = logits.double() / temperatures.where(temperatures > 0, 1) - noise.log()
    return raced.where(temperatures > 0, logits.double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_are_those_of_the_keyed_noise(dtype: torch.dtype) -> None:
    """The first three of each of 120 rows: 10,800 numbers decide them."""
    rng, vocab_size = random.Random(7), 90
    draws = random_draws(rng, 120)
    logits = torch.randn(120, vocab_size, generator=torch.Generator().manual_seed(7)).to(dtype)
    logits[::7, 10:] = -torch.inf
    logits[::5, 20] = logits[::5, 40] = 4.0
    tokens, scores = (part.cpu() for part in launches.draw_by_kernels(logits.to(DEVICE), described(draws), 3))
    raced = race(
        logits.double() / torch.tensor([[draw.sampling.temperature or 1] for draw in draws], dtype=torch.float64),
        exponentials([Key(draw.seed, draw.position) for draw in draws], Domain.COUPLED, vocab_size),
    )
    is_greedy = torch.tensor([draw.sampling.greedy for draw in draws])
    assert torch.equal(tokens[:, 0].long(), torch.where(is_greedy, greedy(logits), raced))
    ordered, order = scores_of(logits, draws).sort(descending=True, stable=True)
    np.testing.assert_allclose(scores, ordered[:, :3], rtol=1e-12, atol=1e-12)
    assert torch.equal(tokens.long(), order[:, :3])


def test_leaders_of_a_large_vocabulary_are_ranked_by_score_then_by_token() -> None:
    rng = random.Random(8)
    draws = [*random_draws(rng, 5), Draw(SamplingParams(0.0), 1, 1)]
    logits = 3 * torch.randn(6, 5003, generator=torch.Generator().manual_seed(8))
    logits[5, [4, 2050, 5002, 100]] = 20.0  # of four programs
    tokens, scores = launches.draw_by_kernels(logits.to(DEVICE), described(draws), count=4)
    expected = scores_of(logits, draws).topk(4)
    assert tokens[5].tolist() == [4, 100, 2050, 5002]
    assert torch.equal(tokens[:5].long().cpu(), expected.indices[:5])
    np.testing.assert_allclose(scores.cpu(), expected.values, rtol=1e-12, atol=1e-12)
