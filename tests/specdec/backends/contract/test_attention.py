"""Attention over paged keys equals the reference in this file, and a row's bits depend on its text alone."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.backends.packed_pass import PackedPass, packed_attention
from specdec.kvcache.block_pool import BlockPool
from specdec.kvcache.store import KvStore
from specdec.passes.rows import PassRows, Segment
from tests.models.backends import BACKENDS, backend

BFLOAT16, CPU = torch.bfloat16, torch.device("cpu")
BLOCK = 16
WINDOWS = (None, 1, 3, 100, 200)
LENGTHS = (0, 0, 1, 5, 40, 120, 127, 128, 130, 250, 257)
"""Of contexts. The kernel scores 128 keys at a time."""

SHAPES = [(32, 1, 1), (64, 4, 2), (96, 5, 1), (128, 4, 1), (128, 40, 2), (256, 1, 2)]
"""Sizes of heads, query heads per key head, and threads."""

TOLERANCE = {"avx512": 1 / 256, "torch": 0.01, "cuda": 0.01}
"""Weights, and then sums, are rounded to 8 bits: by half of the last one at most where each is rounded once."""

each_number_of_threads = pytest.mark.parametrize("threads", [1, 2])
each_backend = pytest.mark.parametrize("name", BACKENDS)


@dataclass(frozen=True)
class Shape:
    head_dim: int
    groups: int = 1
    kv_heads: int = 2
    dtype: torch.dtype = BFLOAT16
    loudness: float = 2  # of the scores. The usual is 1: so that every key matters to some row
    spread: float = 0  # of the values of a text, in powers of ten

    @property
    def scale(self) -> float:
        return self.loudness * self.head_dim**-0.5

    def random(self, rng: random.Random, num: int) -> list[Tensor]:
        """Queries, keys and values, [num, heads or kv_heads, head_dim] each."""
        generator = torch.Generator().manual_seed(rng.randrange(2**40))
        heads = self.groups * self.kv_heads, self.kv_heads, self.kv_heads
        query, key, value = (torch.randn(num, number, self.head_dim, generator=generator) for number in heads)
        value *= torch.logspace(-self.spread, self.spread, num)[:, None, None]
        return [tensor.to(self.dtype) for tensor in (query, key, value)]


@dataclass
class Fed:
    """A segment, and what its context and then its rows have: [num_context + rows, heads or kv_heads, head_dim]."""

    segment: Segment
    tensors: list[Tensor]

    @property
    def first(self) -> int:  # place of the first row that is fed
        return self.segment.num_context + self.segment.num_kept

    def slot(self, place: int) -> int:
        return self.segment.block_table[place // BLOCK] * BLOCK + place % BLOCK

    def path(self, row: int) -> list[int]:
        """Rows from the first below the context to this one."""
        above = self.segment.parents[row]
        return [*(self.path(above) if above >= 0 else []), row]


class Pool:
    """A layer's keys and values. Sequences take blocks of it in no order."""

    def __init__(self, rng: random.Random, name: str, num_blocks: int = 200) -> None:
        self.backend = backend(name)
        self.store = KvStore(BlockPool(num_blocks, BLOCK), CPU)
        self._free = list(range(num_blocks))
        rng.shuffle(self._free)

    def fed(self, tensors: list[Tensor], parents: Sequence[int], num_kept: int = 0, exact: bool = True) -> Fed:
        """What is there before its rows are fed is in the pool."""
        num_slots = len(tensors[0])
        table = [self._free.pop() for _ in range(-(-num_slots // BLOCK))]
        ids = [0] * (len(parents) - num_kept)
        fed = Fed(Segment(ids, parents, num_slots - len(parents), table, [], exact), tensors)
        slots = torch.tensor([fed.slot(place) for place in range(fed.first)], dtype=torch.int64)
        self.store.write(0, slots, *(tensor[: fed.first] for tensor in tensors[1:]))
        return fed

    def random(self, rng: random.Random, shape: Shape, most_rows: int = 33) -> Fed:
        """Some rows after a context. Perhaps the first of them are from earlier passes."""
        num_context = rng.choice(LENGTHS)
        num_rows = rng.choice([rows for rows in (1, 1, 2, 5, 9, 33, 150) if rows <= most_rows])
        reach = rng.choice([1, 1, 2, 5])  # 1: a chain
        parents = [rng.randrange(max(-1, row - reach), row) if row else -1 for row in range(num_rows)]
        if rng.random() < 0.3:  # a chunk, then a tree
            parents[: num_rows // 2] = range(-1, num_rows // 2 - 1)
        num_kept = rng.choice([0, 0, rng.randrange(num_rows)])
        return self.fed(shape.random(rng, num_context + num_rows), parents, num_kept, rng.random() < 0.7)

    def packed(self, feds: Sequence[Fed]) -> PackedPass:
        rows = PassRows([fed.segment for fed in feds], BLOCK)
        return PackedPass(self.store, rows, self.backend.attention(rows, BLOCK))


def inputs_of(feds: Sequence[Fed]) -> list[Tensor]:
    return [torch.cat([fed.tensors[which][fed.first :] for fed in feds]) for which in range(3)]


def attend(
    packed: PackedPass,
    feds: Sequence[Fed],
    shape: Shape,
    window: int | None = None,
    softcap: float | None = None,
    threads: int = 1,
) -> Sequence[Tensor]:
    """Of each segment, [rows, heads, head_dim]."""
    torch.set_num_threads(threads)
    output = packed.attend(0, *inputs_of(feds), shape.scale, window, softcap)
    torch.set_num_threads(1)
    return output.split([len(fed.segment.token_ids) for fed in feds])


def reference(fed: Fed, shape: Shape, softcap: float | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """For each window, in float64: what the fed rows' outputs are, and how large the numbers are that they sum."""
    num_context, rows = fed.segment.num_context, range(fed.segment.num_kept, len(fed.segment.parents))
    query, key, value = (tensor.double() for tensor in fed.tensors)
    key, value = (tensor.repeat_interleave(shape.groups, 1) for tensor in (key, value))
    scores = torch.einsum("rhd,khd->hrk", query[fed.first :], key) * shape.scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    for window in WINDOWS:
        seen = torch.zeros(len(rows), len(key), dtype=torch.bool)
        for place, row in enumerate(rows):
            text = [*range(num_context), *(num_context + above for above in fed.path(row))]
            seen[place, text if window is None else text[-window:]] = True
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        exact, magnitude = (torch.einsum("hrk,khd->rhd", weights, numbers) for numbers in (value, value.abs()))
        yield exact, magnitude


def check(
    name: str,
    shape: Shape,
    tolerance: float,
    most_rows: int = 33,
    threads: int = 1,
    softcap: float | None = None,
) -> None:
    rng = random.Random(shape.head_dim * shape.groups + threads)
    pool = Pool(rng, name)
    feds = [pool.random(rng, shape, most_rows) for _ in range(4)]
    expected = [list(reference(fed, shape, softcap)) for fed in feds]
    for number, window in enumerate(WINDOWS):
        outputs = attend(pool.packed(feds), feds, shape, window, softcap, threads)
        for fed, got, of_windows in zip(feds, outputs, expected, strict=True):
            exact, magnitude = of_windows[number]
            excess = (got.double() - exact).abs() - (exact.abs() + magnitude) * tolerance
            assert float(excess.max()) < 1e-5, (window, fed.segment)


@each_backend
@pytest.mark.parametrize(("head_dim", "groups", "threads"), SHAPES)
def test_it_is_attention_of_each_row_over_its_own_text(name: str, head_dim: int, groups: int, threads: int) -> None:
    shape = Shape(head_dim, groups, kv_heads=1 if groups == 40 else 3)
    check(name, shape, TOLERANCE[name], 150 if groups < 40 else 33, threads)
    # A weight close to zero adds next to nothing.
    check(name, Shape(head_dim, groups=4, loudness=25, spread=20), TOLERANCE[name])


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(("groups", "window", "threads"), [(1, None, 1), (4, 100, 2), (5, 3, 1), (40, None, 2)])
def test_a_rows_bits_do_not_depend_on_company_branches_or_chunks(
    name: str, groups: int, window: int | None, threads: int
) -> None:
    """One text, fed in chunks that stand among other nodes of a tree, beside other sequences."""
    shape, rng = Shape(64, groups, kv_heads=1), random.Random(groups)
    pool = Pool(rng, name, 3000)
    text = shape.random(rng, 280)
    neighbours = [pool.random(rng, shape) for _ in range(6)]
    checked = [*range(0, 280, 9), 127, 128, 129, 255, 256]
    alone = {}
    for position in checked:
        row = pool.fed([tensor[: position + 1] for tensor in text], [-1])
        [[alone[position]]] = attend(pool.packed([row]), [row], shape, window)
    num_compared = num_branches = start = 0
    while start < 280 or num_compared < 120:
        start %= 280
        end = min(280, start + rng.choice([1, 2, 7, 40, 150]))
        is_own = [True] * (end - start) + [False] * rng.choice([0, 3, 20])
        rng.shuffle(is_own)
        fed_rows: list[int] = []
        parents: list[int] = []
        for place, belongs in enumerate(is_own):
            parents.append((fed_rows[-1] if fed_rows else -1) if belongs else rng.randrange(-1, place))
            fed_rows += [place] if belongs else []
        tensors = [
            torch.cat(both) for both in zip((t[:start] for t in text), shape.random(rng, len(is_own)), strict=True)
        ]
        for tensor, of_text in zip(tensors, text, strict=True):
            tensor[[start + place for place in fed_rows]] = of_text[start:end]
        feds = [
            pool.fed(tensors, parents, exact=name == "torch" or rng.random() < 0.5),
            *rng.sample(neighbours, rng.randint(0, 5)),
        ]
        company = feds[1:]
        feds = [*company[: len(company) // 2], feds[0], *company[len(company) // 2 :]]
        output = attend(pool.packed(feds), feds, shape, window, threads=threads)[len(company) // 2]
        for place, position in zip(fed_rows, range(start, end), strict=True):
            if position in alone:
                assert torch.equal(output[place], alone[position]), (position, parents)
                num_compared += 1
                num_branches += len(parents) > end - start
        start = end
    assert num_branches > 20


@each_backend
def test_the_layout_of_tensors_does_not_matter_and_padding_becomes_zero(name: str) -> None:
    """Inputs as transformers passes them: [1, heads, rows, head_dim], also as views of [1, rows, heads, head_dim]."""
    shape, rng = Shape(96, groups=3), random.Random(2)
    pool = Pool(rng, name)
    feds = [pool.random(rng, shape) for _ in range(3)]
    inputs = inputs_of(feds)
    num_rows = len(inputs[0])
    expected = torch.cat(list(attend(pool.packed(feds), feds, shape, 100)))
    layer = pool.store.layer(0, *inputs[1:])
    before = [tensor.clone() for tensor in layer]
    padded = [torch.cat([tensor, torch.full_like(tensor[:1], torch.nan).expand(5, -1, -1)]) for tensor in inputs]
    self_drafts = [tensor.transpose(0, 1).contiguous()[None] for tensor in padded]
    together = torch.cat(padded, 1)[None].transpose(1, 2)
    for views in (
        [tensor[None].transpose(1, 2) for tensor in padded],
        self_drafts,
        [tensor.repeat_interleave(2, 2)[:, :, ::2] for tensor in self_drafts],
        together.split([tensor.shape[1] for tensor in padded], 1),
    ):
        packed, module = pool.packed(feds), SimpleNamespace(layer_idx=0)
        options: dict[str, Any] = dict(packed_pass=packed, scaling=shape.scale, sliding_window=100)
        output, _ = packed_attention(module, *views, None, **options)
        assert output.shape == (1, num_rows + 5, 6, 96)
        assert torch.equal(output[0, :num_rows], expected)
        assert not output[0, num_rows:].any()
        assert packed.sound().tolist() == [True] * num_rows
        assert all(map(torch.equal, layer, before))


@each_backend
@each_number_of_threads
@pytest.mark.parametrize("head_dim", [32, 96, 256])
def test_keys_and_values_are_in_their_slots_afterwards_bit_for_bit(name: str, head_dim: int, threads: int) -> None:
    torch.manual_seed(head_dim)
    info = torch.finfo(BFLOAT16)
    numbers = [-0.0, info.max, info.min, info.tiny, -info.tiny / 2, 1.0, torch.nan, -torch.nan, torch.inf, -torch.inf]
    shape, rng = Shape(head_dim, kv_heads=5), random.Random(threads)
    pool = Pool(rng, name)
    feds = [pool.random(rng, shape, 150) for _ in range(4)]
    for fed in feds:
        for tensor in fed.tensors[1:]:
            rows = tensor[fed.first :]
            special = torch.tensor(numbers, dtype=BFLOAT16)[torch.randint(len(numbers), rows.shape)]
            rows.copy_(special.where(torch.rand(rows.shape) < 0.1, rows))
    layer = pool.store.layer(0, *inputs_of(feds)[1:])
    expected = [tensor.clone() for tensor in layer]
    for fed in feds:
        for place in range(fed.first, len(fed.tensors[0])):
            for slots, tensor in zip(expected, fed.tensors[1:], strict=True):
                slots.flatten(0, 1)[fed.slot(place)] = tensor[place].where(tensor[place].isfinite(), 0)
    attend(pool.packed(feds), feds, shape, threads=threads)
    for got, wanted in zip(layer, expected, strict=True):
        assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


@each_backend
@each_number_of_threads
@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=str)
def test_nothing_of_an_unsound_row_reaches_another_text(name: str, number: float, threads: int) -> None:
    shape, rng = Shape(64, groups=4), random.Random(4)
    pool = Pool(rng, name)
    feds = [pool.random(rng, shape) for _ in range(4)]
    feds.insert(2, pool.fed(shape.random(rng, 29), range(-1, 8)))
    before = attend(pool.packed(feds), feds, shape, threads=threads)
    for tensor in feds[2].tensors:
        tensor[24, -1, 5] = number
    packed = pool.packed(feds)
    after = attend(packed, feds, shape, threads=threads)
    assert not after[2][4].isfinite().all()
    assert torch.equal(after[2][:4], before[2][:4]), "nor one before it in its own"
    num_before = sum(map(len, after[:2]))
    assert (~packed.sound()).nonzero().flatten().tolist() == [num_before + 4]
    del feds[2]
    now = attend(pool.packed(feds), feds, shape, threads=threads)
    for others in (now, [*after[:2], *after[3:]]):
        assert all(map(torch.equal, others, [*before[:2], *before[3:]]))


@each_backend
@pytest.mark.parametrize(("head_dim", "softcap"), [(16, None), (64, 2.0), (80, None), (288, None)])
def test_heads_that_fill_no_registers_and_capped_scores(name: str, head_dim: int, softcap: float | None) -> None:
    check(name, Shape(head_dim, groups=4, dtype=torch.float32), 1e-5, softcap=softcap)
    check(name, Shape(head_dim, groups=4), 0.03 if softcap else 0.01, softcap=softcap)
