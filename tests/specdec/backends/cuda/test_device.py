"""What a host does for a pass on a device: launches, one wait, and graphs. On devices that stand in for a GPU."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.backends.cuda import attention, backend, graphs
from specdec.backends.cuda.backend import CudaBackend
from specdec.backends.cuda.graphs import Captured
from specdec.backends.cuda.static_pass import StaticPass
from specdec.backends.packed_pass import PackedPass
from specdec.backends.torch.backend import TorchBackend
from specdec.core.sequence import Draw, SamplingParams
from specdec.kvcache.block_pool import BlockPool
from specdec.kvcache.store import KvStore
from specdec.passes.outputs import PassOutputs
from specdec.passes.rows import PassRows, Segment
from tests.models.counted_device import DEVICE, CountedDevice

VOCAB, HIDDEN, NUM_LAYERS, BLOCK = 40, 16, 3, 16


class FarModel:
    """Layers that are nothing but attention, with all weights on the counted device."""

    device, dtype = DEVICE, torch.float32

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(VOCAB, HIDDEN, generator=generator)
        self._weights = weights.to(DEVICE, non_blocking=True)
        self.head = torch.nn.Identity()

    def get_output_embeddings(self) -> torch.nn.Module:
        return self.head

    def __call__(
        self, input_ids: Tensor, position_ids: Tensor, use_cache: bool, logits_to_keep: Tensor, packed_pass: PackedPass
    ) -> Any:
        states = torch.nn.functional.embedding(input_ids[0], self._weights)
        for layer in range(NUM_LAYERS):
            heads = states.view(len(states), 2, -1)
            attended = packed_pass.attend(layer, heads, heads, value=heads, scale=1.0, window=None, softcap=None)
            states = states + attended.flatten(1)
        kept = self.head(states.index_select(0, logits_to_keep)[None])
        return SimpleNamespace(logits=kept @ self._weights.t())


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Launches of kernels, by name. In place of kernels, what has the same inputs and outputs."""
    counts: Counter[str] = Counter()

    def attend(memory: Any, pool: Any, query: Tensor, output: Tensor, **_: Any) -> None:
        counts["attend"] += 1
        output.copy_(query)

    def draw(logits: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        counts["draw"] += 1
        best = logits.max(-1, keepdim=True)
        return best.indices.int(), best.values

    monkeypatch.setattr(attention, "store_by_kernel", lambda *_: counts.update(["store"]))
    monkeypatch.setattr(attention, "attend_by_kernels", attend)
    monkeypatch.setattr(backend, "draw_by_kernels", draw)
    return counts


def far_pass(num_sequences: int, num_further: int) -> tuple[CountedDevice, PassOutputs]:
    """A second pass of its size, so that its memory is there."""
    cuda = CudaBackend(TorchBackend(DEVICE, 1 << 20))
    with CountedDevice() as device:
        call = StaticPass(FarModel(), VOCAB, cuda.draw_pass)  # type: ignore[arg-type]
        store = KvStore(BlockPool(64, BLOCK), DEVICE)
        draw = Draw(SamplingParams(0.7), 3, 5)
        chains = [Segment.chain([5, 7, 9], 2, [2 * n, 2 * n + 1], logit_rows=[2]) for n in range(num_sequences)]
        for _ in range(2):
            device.waits.clear()
            device.num_operations = 0
            rows = PassRows([replace(chain, num_further=num_further, draw=draw) for chain in chains], BLOCK)
            packed = PackedPass(store, rows, cuda.attention(rows, BLOCK))
            ids = [token for chain in chains for token in chain.token_ids]
            outputs = call(ids, rows.positions, rows.last_rows, packed)
    return device, outputs


@pytest.mark.parametrize("num_further", [0, 1, 7])
def test_the_host_waits_once_for_a_pass_and_all_rows_that_follow(launched: Counter[str], num_further: int) -> None:
    for num_sequences in (1, 4):
        launched.clear()
        device, outputs = far_pass(num_sequences, num_further)
        assert device.num_waits == 1, device.waits
        assert [len(further) for further in outputs.further] == [num_further] * (num_sequences if num_further else 0)
        assert len(outputs.sound_rows) == num_sequences * (3 + num_further)
        num_passes = 2 * (1 + num_further)
        assert launched == {
            "store": NUM_LAYERS * num_passes,
            "attend": NUM_LAYERS * num_passes,
            "draw": num_passes,
        }


def test_more_sequences_take_no_more_operations(launched: Counter[str]) -> None:
    assert len({far_pass(num, 3)[0].num_operations for num in (1, 2, 5)}) == 1


class FakeGraph:
    """Stands in for torch.cuda.CUDAGraph: it computes again what ran while it was captured."""

    def __init__(self) -> None:
        self.num_replays = 0

    def replay(self) -> None:
        self.num_replays += 1


class FakeMemory:
    """Stands in for a tensor on a GPU."""

    device = torch.device("cuda:0")

    def __init__(self, number: int) -> None:
        self.number = number

    def clone(self) -> FakeMemory:
        return FakeMemory(self.number)

    def copy_(self, other: FakeMemory) -> None:
        self.number = other.number


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> list[FakeGraph]:
    """The graphs that are made from now on."""
    made: list[FakeGraph] = []
    stream = SimpleNamespace(wait_stream=lambda _: None)

    @contextmanager
    def nothing(*_: Any, **options: Any) -> Iterator[None]:
        assert options.get("capture_error_mode", "thread_local") == "thread_local", "other threads use the device"
        yield

    def graph() -> FakeGraph:
        made.append(FakeGraph())
        return made[-1]

    fake = SimpleNamespace(
        Stream=lambda _: stream, current_stream=lambda _: stream, stream=nothing, CUDAGraph=graph, graph=nothing
    )
    monkeypatch.setattr(graphs.torch, "cuda", fake)
    return made


def test_a_function_is_captured_once_and_then_replayed(fakes: list[FakeGraph]) -> None:
    memory: Any = FakeMemory(1)

    def compute(step: int) -> list[int]:
        memory.number += step
        return [memory.number]

    call = Captured(compute, memory)
    results = [call(3) for _ in range(4)]
    assert all(result is results[0] for result in results), "the same memory every time"
    assert memory.number == 1, "what runs before the first replay changes nothing"
    assert [graph.num_replays for graph in fakes] == [4]


def test_a_function_that_cannot_be_captured_is_called_and_the_log_says_why(
    fakes: list[FakeGraph], caplog: pytest.LogCaptureFixture
) -> None:
    num_calls = 0

    def compute() -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:  # the first call is not captured
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return num_calls

    call: Any = Captured(compute, FakeMemory(1))  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING):
        assert [call() for _ in range(3)] == [3, 4, 5]
    [record] = caplog.records
    assert record.reason == "operation not permitted when stream is capturing"  # type: ignore[attr-defined]
    assert [graph.num_replays for graph in fakes] == [0]
