"""Attention over keys where they lie computes what is written down here, and a row's bits depend on its text alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from specdec import paged_attention
from specdec.gathered_attention import GatheredAttention
from specdec.kv_cache import BlockPool
from specdec.kv_store import KvStore
from specdec.packed_attention import PackedPass, packed_attention
from specdec.packed_rows import Segment
from specdec.paged_attention import PagedAttention

BFLOAT16, CPU = torch.bfloat16, torch.device("cpu")
BLOCK = 16
WINDOWS = (None, 1, 3, 100, 200)
LENGTHS = (0, 0, 1, 5, 40, 120, 127, 128, 130, 250, 257)
"""Of contexts. The kernel scores 128 keys at a time."""

only_here = pytest.mark.skipif(paged_attention._compute() is None, reason="not on this CPU, or not built")


@pytest.fixture(params=[1, 2], ids=["1 thread", "2 threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def paged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(GatheredAttention, "attend")


@pytest.fixture
def gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(PagedAttention, "attend")


@dataclass(frozen=True)
class Shape:
    head_dim: int
    groups: int = 1
    kv_heads: int = 2
    dtype: torch.dtype = BFLOAT16

    @property
    def scale(self) -> float:
        """Louder than usual, so that every key matters to some row."""
        return 2 * self.head_dim**-0.5

    def random(self, rng: random.Random, num: int) -> list[Tensor]:
        """Queries, keys and values, [num, heads or kv_heads, head_dim] each."""
        generator = torch.Generator().manual_seed(rng.randrange(2**40))
        return [
            torch.randn(num, heads, self.head_dim, generator=generator).to(self.dtype)
            for heads in (self.groups * self.kv_heads, self.kv_heads, self.kv_heads)
        ]


class Pool:
    """A layer's keys and values. Sequences take blocks of it in no order."""

    def __init__(self, rng: random.Random, num_blocks: int = 200) -> None:
        self.store = KvStore(BlockPool(num_blocks, BLOCK), CPU)
        self._free = list(range(num_blocks))
        rng.shuffle(self._free)

    def table(self, num_slots: int) -> list[int]:
        return [self._free.pop() for _ in range(-(-num_slots // BLOCK))]

    def write(self, fed: Fed, places: range) -> None:
        _, keys, values = (tensor[list(places)] for tensor in fed.tensors)
        self.store.write(0, torch.tensor([fed.slot(place) for place in places], dtype=torch.int64), keys, values)


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


def random_parents(rng: random.Random, num_rows: int) -> list[int]:
    reach = rng.choice([1, 1, 2, 5])  # 1: a chain
    parents = [rng.randrange(max(-1, row - reach), row) if row else -1 for row in range(num_rows)]
    if rng.random() < 0.3:  # a chunk, then a tree
        parents[: num_rows // 2] = range(-1, num_rows // 2 - 1)
    return parents


def random_fed(rng: random.Random, pool: Pool, shape: Shape, most_rows: int = 150) -> Fed:
    """Some rows after a context, which is in the pool; perhaps the first of them are there, too."""
    num_context = rng.choice(LENGTHS)
    num_rows = rng.choice([rows for rows in (1, 1, 2, 5, 9, 33, 150) if rows <= most_rows])
    parents = random_parents(rng, num_rows)
    num_kept = rng.choice([0, 0, rng.randrange(num_rows)])
    table = pool.table(num_context + num_rows)
    segment = Segment([0] * (num_rows - num_kept), parents, num_context, table, [], exact=rng.random() < 0.7)
    fed = Fed(segment, shape.random(rng, num_context + num_rows))
    pool.write(fed, range(fed.first))
    return fed


def inputs_of(feds: list[Fed]) -> list[Tensor]:
    return [torch.cat([fed.tensors[which][fed.first :] for fed in feds]) for which in range(3)]


def pass_of(pool: Pool, feds: list[Fed]) -> PackedPass:
    return PackedPass(pool.store, [fed.segment for fed in feds], BLOCK, CPU)


def attend(
    pool: Pool, feds: list[Fed], shape: Shape, window: int | None = None, softcap: float | None = None
) -> list[Tensor]:
    """Of each segment, [rows, heads, head_dim]."""
    output = pass_of(pool, feds).attend(0, *inputs_of(feds), shape.scale, window, softcap)
    return list(output.split([len(fed.segment.token_ids) for fed in feds]))


def reference(
    fed: Fed, shape: Shape, windows: tuple[int | None, ...], softcap: float | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """For each window, in float64: what the fed rows' outputs are, and how large the numbers are that they sum."""
    num_context, rows = fed.segment.num_context, range(fed.segment.num_kept, len(fed.segment.parents))
    query, key, value = (tensor.double() for tensor in fed.tensors)
    key, value = (tensor.repeat_interleave(shape.groups, 1) for tensor in (key, value))
    scores = torch.einsum("rhd,khd->hrk", query[fed.first :], key) * shape.scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    for window in windows:
        seen = torch.zeros(len(rows), len(key), dtype=torch.bool)
        for place, row in enumerate(rows):
            text = [*range(num_context), *(num_context + above for above in fed.path(row))]
            seen[place, text if window is None else text[-window:]] = True
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        sums = [torch.einsum("hrk,khd->rhd", weights, numbers) for numbers in (value, value.abs())]
        yield sums[0], sums[1]


@only_here
@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("groups", [1, 4, 5, 40])
@pytest.mark.parametrize("head_dim", [32, 64, 96, 128, 256])
def test_it_is_attention_of_each_row_over_its_own_text(head_dim: int, groups: int, threads: int) -> None:
    shape = Shape(head_dim, groups, kv_heads=1 if groups == 40 else 3)
    rng = random.Random(head_dim + groups + threads)
    pool = Pool(rng)
    feds = [random_fed(rng, pool, shape, 33 if groups == 40 else 150) for _ in range(4)]
    expected = [list(reference(fed, shape, WINDOWS)) for fed in feds]
    for number, window in enumerate(WINDOWS):
        for fed, got, of_windows in zip(feds, attend(pool, feds, shape, window), expected, strict=True):
            exact, magnitude = of_windows[number]
            # Weights and sums are rounded to 8 bits, each by half of the last one at most.
            excess = (got.double() - exact).abs() - (exact.abs() + magnitude) / 256
            assert float(excess.max()) < 1e-5, (window, fed.segment)


@dataclass
class Text:
    """A text that is fed again and again, in other ways."""

    pool: Pool
    shape: Shape
    tensors: list[Tensor]
    window: int | None

    def fed(self, rng: random.Random, start: int, end: int, num_others: int, exact: bool) -> tuple[Fed, list[int]]:
        """Its positions from ``start`` on, among other nodes of a tree; and where they are among the rows."""
        parents: list[int] = []
        places: list[int] = []
        own = [True] * (end - start) + [False] * num_others
        rng.shuffle(own)
        for row, is_own in enumerate(own):
            # What is not the text's own hangs on anything, perhaps on the text.
            parents.append((places[-1] if places else -1) if is_own else rng.randrange(-1, row))
            if is_own:
                places.append(row)
        tensors = [
            torch.cat([text[:start], others]) for text, others in zip(self.tensors, self._others(rng, own), strict=True)
        ]
        for tensor, text in zip(tensors, self.tensors, strict=True):
            tensor[[start + place for place in places]] = text[start:end]
        table = self.pool.table(len(tensors[0]))
        fed = Fed(Segment([0] * len(own), parents, start, table, [], exact), tensors)
        self.pool.write(fed, range(start))
        return fed, places

    def _others(self, rng: random.Random, rows: list[bool]) -> list[Tensor]:
        return self.shape.random(rng, len(rows))

    def alone(self, position: int) -> Tensor:
        fed, _ = self.fed(random.Random(0), position, position + 1, 0, True)
        [output] = attend(self.pool, [fed], self.shape, self.window)
        return output[0]


@only_here
@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("window", [None, 3, 100], ids=str)
@pytest.mark.parametrize("groups", [1, 4, 5, 40])
def test_a_rows_bits_do_not_depend_on_company_branches_or_chunks(groups: int, window: int | None, threads: int) -> None:
    shape, rng = Shape(64, groups, kv_heads=1), random.Random(groups)
    length = 280
    pool = Pool(rng, 8000)
    text = Text(pool, shape, shape.random(rng, length), window)
    alone: dict[int, Tensor] = {}
    neighbours = [random_fed(rng, pool, shape, 33) for _ in range(6)]
    num_compared = num_branches = num_beside_whole_trees = 0
    for _ in range(3):
        start = 0
        while start < length:
            end = min(length, start + rng.choice([1, 1, 2, 7, 40, 150]))
            num_others, exact = rng.choice([0, 0, 4, 20]), rng.random() < 0.5
            fed, places = text.fed(rng, start, end, num_others, exact)
            company = rng.sample(neighbours, rng.randint(0, 5))
            at = rng.randint(0, len(company))
            output = attend(pool, [*company[:at], fed, *company[at:]], shape, window)[at]
            for place, position in zip(places, range(start, end), strict=True):
                if position % 5 and end - start > 2 and position not in (127, 128, 129, 255, 256):
                    continue
                if position not in alone:
                    alone[position] = text.alone(position)
                assert torch.equal(output[place], alone[position]), (position, fed.segment, window)
                num_compared += 1
                num_branches += num_others > 0
                num_beside_whole_trees += num_others > 0 and not exact
            start = end
    assert num_compared > 100
    assert min(num_branches, num_beside_whole_trees) > 10


@only_here
@pytest.mark.usefixtures("paged")
def test_how_tensors_lie_does_not_matter_and_padding_becomes_nothing() -> None:
    """As transformers gives them: [1, heads, rows, head_dim], made of [1, rows, heads, head_dim], or of all three."""
    shape, rng = Shape(96, groups=3), random.Random(2)
    pool = Pool(rng)
    feds = [random_fed(rng, pool, shape, 33) for _ in range(3)]
    inputs = inputs_of(feds)
    num_rows = len(inputs[0])
    expected = torch.cat(attend(pool, feds, shape, 100))
    keys, values = pool.store.layer(0, *inputs[1:])
    before = keys.clone(), values.clone()
    padded = [torch.cat([tensor, torch.full_like(tensor[:1], torch.nan).expand(5, -1, -1)]) for tensor in inputs]
    by_head = [tensor.transpose(0, 1).contiguous()[None] for tensor in padded]
    together = torch.cat(padded, 1)[None].transpose(1, 2)
    for views in (
        [tensor[None].transpose(1, 2) for tensor in padded],
        by_head,
        [tensor.repeat_interleave(2, 2)[:, :, ::2] for tensor in by_head],
        list(together.split([tensor.shape[1] for tensor in padded], 1)),
    ):
        packed = pass_of(pool, feds)
        output, none = packed_attention(
            SimpleNamespace(layer_idx=0),  # type: ignore[arg-type]
            *views,
            None,
            packed_pass=packed,
            scaling=shape.scale,
            sliding_window=100,
        )
        assert none is None
        assert output.shape == (1, num_rows + 5, 6, 96)
        assert torch.equal(output[0, :num_rows], expected)
        assert not output[0, num_rows:].any()
        assert packed.sound().tolist() == [True] * num_rows
        assert torch.equal(keys, before[0])
        assert torch.equal(values, before[1])


@only_here
@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("head_dim", [32, 96, 256])
def test_keys_and_values_are_in_their_slots_afterwards_bit_for_bit(head_dim: int, threads: int) -> None:
    info = torch.finfo(BFLOAT16)
    numbers = torch.tensor([-0.0, info.max, info.min, info.tiny, -info.tiny / 2, 1.0], dtype=BFLOAT16)
    others = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf], dtype=BFLOAT16)
    shape, rng = Shape(head_dim, kv_heads=5), random.Random(threads)
    pool = Pool(rng)
    feds = [random_fed(rng, pool, shape) for _ in range(4)]
    for fed in feds:
        for tensor in fed.tensors[1:]:
            bits = torch.cat([numbers, others])[torch.randint(10, tensor[fed.first :].shape)]
            tensor[fed.first :] = bits.where(torch.rand(bits.shape) < 0.1, tensor[fed.first :])
    keys, values = pool.store.layer(0, *inputs_of(feds)[1:])
    expected = keys.clone(), values.clone()
    for fed in feds:
        for place in range(fed.first, len(fed.tensors[0])):
            for slots, tensor in zip(expected, fed.tensors[1:], strict=True):
                slots.flatten(0, 1)[fed.slot(place)] = tensor[place].where(tensor[place].isfinite(), 0)
    attend(pool, feds, shape)
    for got, wanted in zip((keys, values), expected, strict=True):
        assert torch.equal(got.view(torch.int16), wanted.view(torch.int16))


@only_here
@pytest.mark.usefixtures("paged")
@pytest.mark.parametrize("number", [torch.nan, torch.inf], ids=str)
def test_nothing_of_a_row_that_is_not_sound_reaches_another_text(number: float, threads: int) -> None:
    shape, rng = Shape(64, groups=4), random.Random(4)
    pool = Pool(rng)
    feds = [random_fed(rng, pool, shape, 33) for _ in range(5)]
    spoilt = Fed(Segment([0] * 9, range(-1, 8), 20, pool.table(29), []), shape.random(rng, 29))
    pool.write(spoilt, range(20))
    before = attend(pool, [*feds, spoilt], shape)
    for tensor in spoilt.tensors:
        tensor[24, -1, 5] = number
    together = [*feds[:2], spoilt, *feds[2:]]
    packed = pass_of(pool, together)
    output = packed.attend(0, *inputs_of(together), shape.scale, None, None)
    got = output.split([len(fed.segment.token_ids) for fed in together])
    for now, then in zip((*got[:2], *got[3:]), before[:-1], strict=True):
        assert torch.equal(now, then)
    assert torch.equal(got[2][:4], before[-1][:4]), "nor one before it in its own"
    assert not got[2][4].isfinite().all()
    sound = packed.sound()
    assert (~sound).nonzero().flatten().tolist() == [sum(map(len, got[:2])) + 4]
    # Nor what has its slots afterwards.
    assert all(torch.equal(now, then) for now, then in zip(attend(pool, feds, shape), before[:-1], strict=True))


def check_gathered(shape: Shape, tolerance: float, softcap: float | None = None) -> None:
    rng = random.Random(shape.head_dim)
    pool = Pool(rng)
    feds = [random_fed(rng, pool, shape, 33) for _ in range(4)]
    expected = [list(reference(fed, shape, WINDOWS, softcap)) for fed in feds]
    for number, window in enumerate(WINDOWS):
        for got, of_windows in zip(attend(pool, feds, shape, window, softcap), expected, strict=True):
            exact, magnitude = of_windows[number]
            assert ((got.double() - exact).abs() <= (exact.abs() + magnitude) * tolerance + 1e-5).all(), window


@pytest.mark.usefixtures("gathered")
@pytest.mark.parametrize("head_dim", [16, 64, 80, 288])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_float32_is_gathered(head_dim: int, softcap: float | None) -> None:
    check_gathered(Shape(head_dim, groups=4, dtype=torch.float32), 1e-5, softcap)


@pytest.mark.usefixtures("gathered")
@pytest.mark.parametrize("head_dim", [16, 80, 288])
def test_heads_that_do_not_fill_registers_are_gathered(head_dim: int) -> None:
    check_gathered(Shape(head_dim, groups=4), 0.01)


@pytest.mark.usefixtures("gathered")
def test_capped_scores_are_gathered() -> None:
    check_gathered(Shape(64, groups=4), 0.03, softcap=2.0)


@pytest.mark.usefixtures("gathered")
def test_without_the_compiled_function_all_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_attention, "_compute", lambda: None)
    check_gathered(Shape(64, groups=4), 0.01)
