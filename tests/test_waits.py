"""Law: the host waits for a device a few times per pass, however many sequences and nodes the pass has."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from draft_service.drafter import DraftSequence
from draft_service.drafters.proposal import draw, rank
from specdec.backends.packed_pass import PackedPass
from specdec.backends.torch.backend import TorchBackend
from specdec.core.noise import Domain, Key, exponentials
from specdec.core.rounds import TargetOpen
from specdec.core.sequence import Method, SamplingParams, SequenceSpec
from specdec.core.tree import SparseDistribution, TokenTree
from specdec.kvcache.block_pool import BlockPool, Move
from specdec.kvcache.store import KvStore
from specdec.passes.outputs import PassOutputs, RowOutputs, of_segments
from specdec.passes.rows import PassRows, Segment
from specdec.sampling.state import SamplingState
from target_service.decision import Case, decide
from target_service.language_model import LmVerifier
from target_service.verifier import Job
from tests.models.counted_device import DEVICE, CountedDevice
from tests.models.table_runner import TableRunner
from tests.target_service.test_decision import PARAMS, VOCAB, Memory

CPU = torch.device("cpu")
SHAPES = [(2, 2), (9, 2), (2, 7), (9, 7)]
"""Sequences, nodes of each."""

LOGITS_PER_CALL = 1 << 20


def example(seed: int, num_nodes: int, method: Method, params: SamplingParams) -> tuple[Case, Tensor]:
    """A case, and the logits [1 + nodes, vocab] of its rows."""
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    spec = SequenceSpec((5, 6, 7, seed), 2, params, seed, method)
    tokens = [rng.randrange(VOCAB) for _ in range(num_nodes)]
    probs = [SparseDistribution((token, VOCAB - 1 - token), (1.0, 0.5)) for token in tokens]
    logits = 3 * torch.randn(1 + num_nodes, VOCAB, generator=generator)
    logits[range(num_nodes), tokens] += 12
    tree = TokenTree.chain(tokens, () if spec.keyed_by_token else probs)
    return Case(SamplingState(spec), list(spec.token_ids), tree), logits


def outputs_of(logits: Sequence[Tensor], device: torch.device) -> list[RowOutputs]:
    every = torch.cat(list(logits)).to(device, non_blocking=True)
    sound = torch.ones(len(every), dtype=torch.bool, device=device)
    return of_segments(PassOutputs(every, every, sound), [len(each) for each in logits], [len(each) for each in logits])


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("method", list(Method))
def test_decisions_wait_as_often_for_many_as_for_few(method: Method, params: SamplingParams) -> None:
    waits = []
    for num_jobs, num_nodes in SHAPES:
        cases, logits = zip(*(example(seed, num_nodes, method, params) for seed in range(num_jobs)), strict=True)
        expected = decide(cases, outputs_of(logits, CPU), TorchBackend(CPU, LOGITS_PER_CALL))
        with CountedDevice() as device:
            assert decide(cases, outputs_of(logits, DEVICE), TorchBackend(DEVICE, LOGITS_PER_CALL)) == expected
        assert sum(len(decision.accepted) for decision in expected)
        waits.append(device.num_waits)
    assert len(set(waits)) == 1
    assert waits[0] <= 8


@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("method", list(Method))
def test_proposals_wait_as_often_for_many_as_for_few(method: Method, params: SamplingParams) -> None:
    waits = []
    for num_sequences in (2, 9):
        cases, logits = zip(*(example(seed, 0, method, params) for seed in range(num_sequences)), strict=True)
        sequences = [DraftSequence(case.spec, case.ids, state=Memory(case.sampling)) for case in cases]
        for sequence in sequences:
            sequence.num_candidates = 3
        expected = proposed(sequences, outputs_of(logits, CPU), CPU)
        with CountedDevice() as device:
            assert proposed(sequences, outputs_of(logits, DEVICE), DEVICE) == expected
        waits.append(device.num_waits)
    assert len(set(waits)) == 1
    assert waits[0] <= 8


def proposed(sequences: Sequence[DraftSequence], outputs: Sequence[RowOutputs], device: torch.device) -> list[Any]:
    if sequences[0].spec.keyed_by_token:
        places = [(each, each.tree, of_rows) for each, of_rows in zip(sequences, outputs, strict=True)]
        return [*rank(places, TorchBackend(device, LOGITS_PER_CALL))]
    return [*draw(sequences, [each.logits for each in outputs], LOGITS_PER_CALL)]


def test_attention_and_moves_of_slots_wait_for_nothing() -> None:
    block_size, table = 16, [3, 1, 7, 4]
    generator = torch.Generator().manual_seed(3)
    segments = [Segment([1] * 5, [-1, 0, 0, 1, 2], 20, table, range(5)), Segment([1, 2], [-1, 0], 0, [5], [1])]
    num_rows = sum(len(segment.token_ids) for segment in segments)
    tensors = [torch.randn(num_rows, heads, 32, generator=generator) for heads in (4, 2, 2)]

    def attended(device: torch.device) -> Tensor:
        rows, store = PassRows(segments, block_size), KvStore(BlockPool(9, block_size), device)
        packed = PackedPass(store, rows, TorchBackend(device, LOGITS_PER_CALL).attention(rows, block_size))
        outputs = []
        for window in (None, 3):
            there = (tensor.to(device, non_blocking=True) for tensor in tensors)
            outputs.append(packed.attend(0, *there, 0.2, window, None))
            store.move([Move(48, 49), Move(49, 16)])
        return torch.stack(outputs)

    with CountedDevice() as device:
        found: Any = attended(DEVICE)
    torch.testing.assert_close(found.here, attended(CPU))  # torch takes another kernel than on a CPU
    assert not device.waits


def test_noise_of_many_rows_takes_as_many_operations_as_of_one() -> None:
    counts = []
    for num_rows in (1, 160):
        keys = [Key(row, 3 + row, 5) for row in range(num_rows)]
        with CountedDevice() as device:
            found: Any = exponentials(keys, Domain.CORRECTION, 30_000, DEVICE)
        assert torch.equal(found.here, exponentials(keys, Domain.CORRECTION, 30_000, CPU))
        counts.append(device.num_operations)
    assert counts[0] == counts[1]


class FarRunner(TableRunner):
    """Its outputs are on the counted device."""

    def forward(self, segments: Sequence[Segment]) -> list[RowOutputs]:
        return outputs_of([each.logits for each in super().forward(segments)], DEVICE)


def test_a_verifier_waits_as_often_for_many_sequences_as_for_few() -> None:
    waits = []
    for num_sequences in (2, 9):
        verifier = LmVerifier(FarRunner(seed=4))
        spec = SequenceSpec((1,), 1, SamplingParams(0.0))
        jobs = [Job(TargetOpen(spec), verifier.open(spec), [1], TokenTree.chain([2, 3])) for _ in range(num_sequences)]
        with CountedDevice() as device:
            decisions, _ = verifier.verify(jobs)
        waits.append(device.num_waits)
        assert decisions == [decided_near(spec)] * num_sequences
    assert waits[0] == waits[1]


def decided_near(spec: SequenceSpec) -> Any:
    verifier = LmVerifier(TableRunner(seed=4))
    [decision], _ = verifier.verify([Job(TargetOpen(spec), verifier.open(spec), [1], TokenTree.chain([2, 3]))])
    return decision


class Event:
    """Stands in for torch.cuda.Event."""

    noted: ClassVar[list[str]] = []

    def __init__(self, enable_timing: bool) -> None:
        self.noted.append("event")

    def record(self, stream: object) -> None:
        assert stream == "stream of cuda:0"

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: Event) -> float:  # ms
        return 123.0


def test_the_time_of_a_pass_ends_when_the_device_has_computed_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    runner = TableRunner()
    monkeypatch.setattr(
        runner, "forward", lambda segments: Event.noted.append("pass") or TableRunner.forward(runner, segments)
    )
    monkeypatch.setattr(runner.backend, "device", torch.device("cuda:0"))
    monkeypatch.setattr(
        "target_service.language_model.decide", lambda *given: Event.noted.append("decide") or decide(*given)
    )
    verifier = LmVerifier(runner)
    spec = SequenceSpec((1, 2), 2)
    _, timings = verifier.verify([Job(TargetOpen(spec), verifier.open(spec), [1, 2])])
    assert Event.noted == ["event", "pass", "event", "decide"]
    assert timings.pass_us == 123_000
    assert timings.sample_us < 100_000
