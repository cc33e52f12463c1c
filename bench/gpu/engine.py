"""Stages of whole passes: models of real sizes with random weights, made on the device."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from bench.gpu.timing import DEVICE, ON_GPU, bandwidth, us_of, wait
from specdec.backends.cuda import static_pass
from specdec.backends.cuda.backend import CudaBackend
from specdec.backends.cuda.static_pass import StaticPass
from specdec.backends.linears import weight_bytes
from specdec.backends.packed_pass import ATTENTION, PackedPass
from specdec.backends.torch.backend import TorchBackend
from specdec.core.sequence import Draw, SamplingParams
from specdec.kvcache.block_pool import BlockPool
from specdec.kvcache.store import KvStore
from specdec.passes.outputs import PassOutputs
from specdec.passes.rows import PassRows, Segment

BLOCK = 16
MAX_TOKENS = 300_000 if ON_GPU else 4_000
"""In the pool at once."""

SHAPES = {"8B": (4096, 14_336, 32), "1B": (2048, 8192, 16), "0.1B": (576, 1536, 30), "tiny": (128, 256, 2)}
"""Hidden size, intermediate size, layers."""


@dataclass
class Engine:
    """A model as the cuda backend runs it, with a pool of its own."""

    backend: CudaBackend
    call: Any
    store: KvStore
    num_bytes: int

    @classmethod
    def of(cls, shape: str, common: bool = True, graphs: bool = True) -> Engine:
        """``common``, ``graphs``: without, the model's own layers, and no CUDA graphs."""
        hidden_size, intermediate_size, num_layers = SHAPES[shape if ON_GPU else "tiny"]
        heads = hidden_size // (128 if hidden_size >= 4096 else 64)
        config = LlamaConfig(
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_hidden_layers=num_layers,
            vocab_size=128_256 if ON_GPU else 512,
            num_attention_heads=heads,
            num_key_value_heads=max(1, heads // (3 if heads % 4 else 4)),
            max_position_embeddings=65_536,
            tie_word_embeddings=shape != "8B",
        )
        with DEVICE:
            model: Any = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16 if ON_GPU else torch.float32)  # type: ignore[no-untyped-call]
        model.eval().set_attn_implementation(ATTENTION)
        backend = CudaBackend(TorchBackend(DEVICE))
        # Without common layers a backend has nothing to do on a GPU.
        plain = StaticPass(model, config.vocab_size, backend.draw_pass)
        call = backend.take(model, config.vocab_size, 65_536) if common else plain
        static_pass._MAX_GRAPH_ROWS = 128 if graphs else 0
        store = KvStore(BlockPool(MAX_TOKENS // BLOCK, BLOCK), DEVICE)
        return cls(backend, call, store, num_bytes=weight_bytes(model))

    @torch.inference_mode()
    def run(self, segments: Sequence[Segment]) -> PassOutputs:
        rows = PassRows(segments, BLOCK)
        packed = PackedPass(self.store, rows, self.backend.attention(rows, BLOCK))
        ids = [token for segment in segments for token in segment.token_ids]
        wanted, start = [], 0
        for segment in segments:
            wanted += [start + row for row in segment.logit_rows]
            start += len(segment.token_ids)
        outputs: PassOutputs = self.call(ids, rows.positions, wanted, packed)
        return outputs


def chains(batch: int, context: int, num_rows: int, num_further: int = 0) -> list[Segment]:
    """Rows at the ends of ``batch`` texts."""
    per_text = -(-(context + num_rows + num_further) // BLOCK)
    draw = Draw(SamplingParams(0.7), 5, context)
    return [
        Segment(
            [7 + row for row in range(num_rows)],
            range(-1, num_rows - 1),
            context,
            range(text * per_text, (text + 1) * per_text),
            range(num_rows),
            num_further=num_further,
            draw=draw,
        )
        for text in range(batch)
    ]


def passes() -> list[dict[str, object]]:
    """Milliseconds of a pass of the 8B shape, and the share that reading the weights would take."""
    limit = bandwidth()
    table: list[dict[str, object]] = []
    for common, graphs in ((False, False), (False, True), (True, True)):
        engine = Engine.of("8B", common, graphs)
        floor = engine.num_bytes / limit * 1e6
        for batch, context, num_rows in sizes():
            us = us_of(engine.run, chains(batch, context, num_rows))
            table.append(
                {
                    "layers": "common" if common else "model's",
                    "graphs": graphs,
                    "sequences": batch,
                    "context": context,
                    "rows each": num_rows,
                    "ms": us / 1e3,
                    "share of floor": floor / us,
                }
            )
        del engine
        if ON_GPU:
            torch.cuda.empty_cache()
    return table


def sizes() -> Iterator[tuple[int, int, int]]:
    """Sequences, tokens of context, rows of each."""
    for batch in (1, 8, 32):
        for context in (128, 4096, 32_768):
            for num_rows in (1, 5, 16, 64):
                if batch * (context + 64) <= MAX_TOKENS and batch * num_rows <= 512:
                    yield batch, context, num_rows


def drafts() -> list[dict[str, object]]:
    """Microseconds of a draft token: further rows of one pass, by number of them."""
    limit = bandwidth()
    table: list[dict[str, object]] = []
    for shape in ("1B", "0.1B"):
        engine = Engine.of(shape)
        one = us_of(engine.run, chains(1, 500, 1))
        for num in (4, 8, 16):
            us = us_of(engine.run, chains(1, 500, 1, num_further=num))
            row: dict[str, object] = {
                "shape": shape,
                "tokens": 1 + num,
                "us": us,
                "us of a further token": (us - one) / num,
            }
            table.append(row | {"floor": engine.num_bytes / limit * 1e6})
    return table


def company() -> list[dict[str, object]]:
    """Whether the logits of one text's rows keep their bits, however they are fed."""
    engine, rng = Engine.of("8B"), random.Random(3)
    num = 96
    ids = [rng.randrange(500) for _ in range(num)]
    table = range(40, 80)

    def fed(chunks: Sequence[int], others: int = 0, branches: int = 0) -> Tensor:
        logits, start = [], 0
        for size in chunks:
            parents = [*range(-1, size - 1), *[size - 1] * branches]
            tokens = [*ids[start : start + size], *range(branches)]
            own = Segment(tokens, parents, start, table, range(size))
            company = [Segment.chain([9] * 4, 0, [100 + n], logit_rows=range(4)) for n in range(others)]
            logits.append(engine.run([*company, own]).logits[4 * others :][:size])
            start += size
        return torch.cat(logits)

    ways = {
        "chunks of 16": fed([16] * 6),
        "in one chunk": fed([num]),
        "row by row": fed([1] * num),
        "beside 8 others": fed([16] * 6, others=8),
        "with trees of 15 nodes": fed([1] * num, branches=15),
        "beside 40 others": fed([16] * 6, others=40),
    }
    expected = ways["row by row"]
    return [
        {
            "fed": name,
            "rows with other bits": int((logits != expected).any(1).sum()),
            "of": num,
            "largest difference": float((logits.float() - expected.float()).abs().max()),
        }
        for name, logits in ways.items()
    ]


def profile() -> list[dict[str, object]]:
    """The kernels that one pass of five rows spends its time in."""
    engine = Engine.of("8B")
    segments = chains(1, 4096 if ON_GPU else 100, 5)
    for _ in range(3):
        engine.run(segments)
    wait()
    activities = [torch.profiler.ProfilerActivity.CPU, *([torch.profiler.ProfilerActivity.CUDA] if ON_GPU else [])]
    with torch.profiler.profile(activities=activities) as profiler:
        started = time.perf_counter()
        engine.run(segments)
        wait()
        total = (time.perf_counter() - started) * 1e6
    events: Any = profiler.key_averages()
    spent = sorted(
        ((event.self_device_time_total if ON_GPU else event.self_cpu_time_total, event) for event in events),
        key=lambda pair: -pair[0],
    )[:20]
    rows = [{"kernel": event.key[:60], "calls": event.count, "us": float(us)} for us, event in spent]
    return [*rows, {"kernel": "the pass", "calls": 1, "us": total}]
