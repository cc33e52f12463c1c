"""Stages of single kernels: what the device can do, and whether kernels are exact and keep a row's bits."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from bench.gpu.timing import DEVICE, ON_GPU, bandwidth, us_in_a_row, us_of
from specdec.backends.cuda.attention import PlannedAttention
from specdec.backends.cuda.launches import attend_by_kernels, draw_by_kernels, store_by_kernel
from specdec.backends.cuda.memory import PassMemory
from specdec.backends.cuda.plan import ALL, ROWS, Plan
from specdec.core.noise import Domain, Key, exponentials
from specdec.kvcache.block_pool import BlockPool
from specdec.kvcache.store import KvStore
from specdec.passes.rows import PassRows, Segment

BLOCK, HEADS, KV_HEADS, HEAD_DIM = 16, 32, 8, 128
DTYPE = torch.bfloat16 if ON_GPU else torch.float32
NUM_BLOCKS = 4096 if ON_GPU else 128


def facts() -> list[dict[str, object]]:
    """Versions, bandwidth, rate of products, launches, and a copy of 8 KiB there and back."""
    import triton

    rows: list[dict[str, object]] = [
        {"what": "torch", "value": torch.__version__},
        {"what": "triton", "value": triton.__version__},
        {"what": "device", "value": torch.cuda.get_device_name() if ON_GPU else "CPU"},
        {"what": "read, TB/s", "value": bandwidth() / 1e12},
    ]
    size = 8192 if ON_GPU else 256
    left, right = (torch.randn(size, size, dtype=DTYPE, device=DEVICE) for _ in range(2))
    rows.append(
        {"what": "products, TFLOP/s", "value": 2 * size**3 / us_in_a_row(torch.mm, left, right, repeats=10) / 1e6}
    )
    one = torch.zeros(16, device=DEVICE)
    rows.append({"what": "launch, us", "value": us_in_a_row(one.add_, 1, repeats=1000)})
    here = torch.zeros(2048, dtype=torch.int32, pin_memory=ON_GPU)
    there = here.to(DEVICE)
    rows.append(
        {"what": "8 KiB there and back, us", "value": us_of(lambda: there.copy_(here, non_blocking=True).cpu())}
    )
    if ON_GPU:
        for num_nodes in (350, 1300):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for _ in range(num_nodes):
                    one.add_(1)
            rows.append({"what": f"node of a graph of {num_nodes}, us", "value": us_of(graph.replay) / num_nodes})
    return rows


class Case:
    """Rows at the end of a text of ``context`` tokens, with random keys and values."""

    def __init__(self, context: int, num_rows: int) -> None:
        generator = torch.Generator().manual_seed(context)
        table = random.Random(context).sample(range(NUM_BLOCKS), -(-(context + num_rows) // BLOCK))
        self.segment = Segment.chain([0] * num_rows, context, table)
        self.store = KvStore(BlockPool(NUM_BLOCKS, BLOCK), DEVICE)
        shapes = (HEADS, KV_HEADS, KV_HEADS)
        self.inputs = [
            torch.randn(num_rows, heads, HEAD_DIM, generator=generator).to(DEVICE, DTYPE) for heads in shapes
        ]
        for part in self.store.layer(0, *self.inputs[1:]):
            part.normal_()

    def computed(self, first: int, end: int, whole: bool = False) -> Tensor:
        """The attention of some of the rows, when only they are in the pass; the rows before them have been fed."""
        before = self.segment.num_context + first
        rows = PassRows([Segment.chain([0] * (end - first), before, self.segment.block_table)], BLOCK)
        plan = Plan.of(rows, BLOCK)
        if whole:
            plan.items = [(0, row, ALL, 1) for row in range(0, end - first, ROWS)]
        memory = PassMemory(plan.shape(), DEVICE, BLOCK)
        memory.load(plan)
        query, key, value = (part[first:end] for part in self.inputs)
        output = torch.full_like(query, torch.nan)
        if not ON_GPU:
            attention = PlannedAttention(DEVICE, BLOCK, memory=memory)
            attention.attend(self.store, 0, query, key, value, output, HEAD_DIM**-0.5, None, None)
            return output
        pool = self.store.layer(0, key, value)
        store_by_kernel(memory, pool, key, value)
        attend_by_kernels(memory, pool, query, output, scale=HEAD_DIM**-0.5, window=None, softcap=None)
        return output

    def exact(self) -> Tensor:
        """In float64."""
        size = self.segment.num_context + len(self.segment.token_ids)
        places = torch.arange(size, device=DEVICE)
        blocks = torch.tensor(self.segment.block_table, device=DEVICE)
        slots = blocks[places // BLOCK] * BLOCK + places % BLOCK
        pool = self.store.layer(0, *self.inputs[1:])
        keys, values = (part.flatten(0, 1)[slots].double().repeat_interleave(HEADS // KV_HEADS, 1) for part in pool)
        scores = torch.einsum("rhd,khd->hrk", self.inputs[0].double(), keys) * HEAD_DIM**-0.5
        hidden = places > places[self.segment.num_context :, None]
        return torch.einsum("hrk,khd->rhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)


def attention() -> list[dict[str, object]]:
    """Error against float64, and rows of which bits change: in another lane, in whole items, in another chunk."""
    rows: list[dict[str, object]] = []
    shapes = [(1, 5), (300, 16), (511, 257), (4000, 5), (4000, 64), (32_000, 5)] if ON_GPU else [(300, 16)]
    for context, num_rows in shapes:
        case = Case(context, num_rows)
        together = case.computed(0, num_rows)
        exact = case.exact()
        picked = range(0, num_rows, max(1, num_rows // 8))
        alone = [not torch.equal(case.computed(row, row + 1)[0], together[row]) for row in picked]
        halves = torch.cat([case.computed(0, num_rows // 2), case.computed(num_rows // 2, num_rows)])
        changed = (halves != together).flatten(1).any(1).sum()
        whole = (case.computed(0, num_rows, whole=True) != together).flatten(1).any(1).sum()
        rows.append(
            {
                "context": context,
                "rows": num_rows,
                "error": float((together.double() - exact).norm() / exact.norm()),
                "changed alone": f"{sum(alone)} of {len(alone)}",
                "changed in halves": int(changed),
                "changed whole": int(whole),
                "us": us_in_a_row(case.computed, 0, num_rows),
            }
        )
    return rows


def coupled_draws() -> list[dict[str, object]]:
    """Tokens of a million numbers against the noise on a CPU, and the time of a few rows of a large vocabulary."""
    num_rows, vocab_size = (256, 4096) if ON_GPU else (4, 512)
    rng = random.Random(1)
    seeds, positions = [rng.randrange(2**63) for _ in range(num_rows)], list(range(num_rows))
    logits = torch.randn(num_rows, vocab_size, dtype=torch.float32)
    noise = exponentials([Key(*pair) for pair in zip(seeds, positions, strict=True)], Domain.COUPLED, vocab_size)
    ranks, count = logits.double() - noise.log(), 8
    if not ON_GPU:
        return [{"rows": num_rows, "note": "kernels run on a GPU alone"}]
    temperatures = torch.ones(num_rows, dtype=torch.float64, device=DEVICE)
    draws = torch.tensor(seeds, device=DEVICE), torch.tensor(positions, device=DEVICE), temperatures
    tokens, scores = draw_by_kernels(logits.to(DEVICE), draws, count=count)
    expected = ranks.topk(count)
    rows: list[dict[str, object]] = [
        {
            "rows": num_rows,
            "vocabulary": vocab_size,
            "other tokens": int((tokens.cpu() != expected.indices).sum()),
            "other bits of scores": int((scores.cpu() != expected.values).sum()),
        }
    ]
    for few in (1, 5, 16, 64):
        large = torch.randn(few, 128_256, dtype=DTYPE, device=DEVICE)
        for number in (1, 4):
            us = us_in_a_row(draw_by_kernels, large, draws, number)
            rows.append({"rows": few, "vocabulary": 128_256, "leaders": number, "us": us})
    return rows


def products() -> list[dict[str, object]]:
    """Products of few rows: time, share of the bandwidth, and for which numbers of rows a row has other bits."""
    limit = bandwidth()
    table: list[dict[str, object]] = []
    shapes = [(6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336), (128_256, 4096)]
    for is_strict in (False, True):
        if ON_GPU:
            torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = (
                (False, False) if is_strict else True  # the second: no split of K
            )
        for shape in shapes if ON_GPU else [(96, 64)]:
            copies = max(1, min(8, (400 << 20) // (2 * shape[0] * shape[1])))  # more than caches hold
            weights = [torch.randn(shape, dtype=DTYPE, device=DEVICE) for _ in range(copies)]
            inputs = torch.randn(512, shape[1], dtype=DTYPE, device=DEVICE)
            first = inputs[:16] @ weights[0].t()
            for num_rows in (1, 5, 16, 32, 64, 128, 512):
                rows = inputs[:num_rows]
                us = us_in_a_row(_each, rows, weights, repeats=20) / copies
                table.append(
                    {
                        "outputs x inputs": f"{shape[0]} x {shape[1]}",
                        "split K": not is_strict,
                        "rows": num_rows,
                        "us": us,
                        "share of bandwidth": weights[0].nbytes / us * 1e6 / limit,
                        "bits as of 16 rows": torch.equal((rows @ weights[0].t())[:16], first[:num_rows]),
                    }
                )
            del weights
    return table


def _each(rows: Tensor, weights: list[Tensor]) -> None:
    for weight in weights:
        rows @ weight.t()
