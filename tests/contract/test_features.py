"""Hidden states on request: those of the rows that the accepted tokens were read from, in frames of bounded length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from bench.models.table_model import Table, TableVerifier
from specdec.passes.outputs import PassOutputs, RowOutputs
from specdec.passes.rows import Segment
from specdec.transport.wire import FEATURE_BYTES
from specdec.v1 import target_pb2
from target_service.language_model import LmVerifier
from tests.contract.bad import assert_violation
from tests.contract.raw import BLOCK, COUPLED, GREEDY, Raw, after, round_, target, target_open, tree
from tests.models.table_runner import TableRunner


class WideRunner(TableRunner):
    """Its hidden states are a text's logits, over and over."""

    def __init__(self, hidden_size: int, dtype: torch.dtype) -> None:
        super().__init__(num_slots=4096)
        self.hidden_size, self.dtype = hidden_size, dtype

    def features(self, text: Sequence[int]) -> torch.Tensor:  # [hidden_size]
        return self.widened(self.logits_after(text)[None])[0]

    def widened(self, logits: torch.Tensor) -> torch.Tensor:  # [rows, hidden_size]
        repeated = logits.repeat(1, -(-self.hidden_size // logits.shape[1]))
        return repeated[:, : self.hidden_size].to(self.dtype)

    def forward(self, segments: Sequence[Segment]) -> list[RowOutputs]:
        return [
            PassOutputs(output.logits, self.widened(output.logits), torch.tensor(output.sound)).as_one()
            for output in super().forward(segments)
        ]


def received(frames: Sequence[target_pb2.VerifyResponse], sequence: int) -> tuple[list[int], np.ndarray]:
    """The positions of all rows that came for a sequence, and the rows as float32."""
    positions: list[int] = []
    rows: list[np.ndarray] = []
    for frame in frames:
        for features in frame.features:
            if features.sequence == sequence:
                kind = {"float32": np.float32, "bfloat16": np.uint16}[features.dtype]
                some: Any = np.frombuffer(features.rows, kind).reshape(-1, features.hidden_size)
                if kind is np.uint16:
                    some = (some.astype(np.uint32) << 16).view(np.float32)
                positions += range(features.position, features.position + len(some))
                rows.extend(some)
    return positions, np.array(rows)


async def all_rows(stream: Raw, sequence: int, count: int) -> tuple[list[int], np.ndarray]:
    await stream.frame_where(lambda _: len(received(stream.frames, sequence)[0]) >= count)
    return received(stream.frames, sequence)


@pytest.mark.parametrize("method", [COUPLED, BLOCK])
@pytest.mark.parametrize(
    ("hidden_size", "dtype"), [(5, torch.float32), (5, torch.bfloat16), (5000, torch.float32), (40_000, torch.bfloat16)]
)
async def test_features_are_those_of_the_accepted_path(method: int, hidden_size: int, dtype: torch.dtype) -> None:
    runner = WideRunner(hidden_size, dtype)
    text = [1, 2, 3]
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await stream.send(
            opens=[target_open(1, return_features=True, method=method, **GREEDY), target_open(2, **GREEDY)]
        )
        count, expected = 1, [runner.features(text)]
        verdict = await stream.answer(1)
        assert verdict.num_feature_rows == 1
        text.append(verdict.next_token)
        base = after(3, verdict)
        for number in range(1, 4):
            drafted = runner.greedy_text(text, 6)
            drafted[4] = (drafted[4] + 1) % 8  # accepted up to here
            await stream.send(rounds=[round_(1, number, base, tree(drafted))])
            verdict = await stream.answer(1)
            assert list(verdict.accepted) == [0, 1, 2, 3]
            assert verdict.num_feature_rows == 5
            for token in drafted[:4]:
                expected.append(runner.features(text))
                text.append(token)
            expected.append(runner.features(text))
            text.append(verdict.next_token)
            base, count = after(base, verdict), count + 5
        positions, rows = await all_rows(stream, 1, count)
        assert positions == list(range(2, 2 + count))
        assert np.array_equal(rows, torch.stack(expected).float().numpy())
        row_bytes = hidden_size * dtype.itemsize
        for frame in stream.frames:
            assert sum(len(features.rows) for features in frame.features) <= max(FEATURE_BYTES, row_bytes)
        assert (await stream.answer(2)).num_feature_rows == 0
        assert received(stream.frames, 2)[0] == []


async def test_features_of_the_children_of_a_branching_tree_are_found_by_path() -> None:
    runner = WideRunner(5, torch.float32)
    async with target(LmVerifier(runner)) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, return_features=True, **GREEDY)])
        verdict = await stream.answer(1)
        text = [1, 2, 3, verdict.next_token]
        first, second = runner.greedy_text(text, 2)
        wrong = (first + 1) % 8
        await stream.send(rounds=[round_(1, 1, 4, tree([wrong, first, second, second], [-1, -1, 0, 1]))])
        assert list((await stream.answer(1)).accepted) == [1, 3]
        positions, rows = await all_rows(stream, 1, 4)
        assert positions == [2, 3, 4, 5]
        expected = [[1, 2, 3], text, [*text, first], [*text, first, second]]
        assert np.array_equal(rows, torch.stack([runner.features(each) for each in expected]).numpy())


async def test_a_target_without_features_refuses_to_return_them() -> None:
    async with target(TableVerifier(Table(vocab_size=8))) as service:
        stream = service.stream()
        await stream.send(opens=[target_open(1, return_features=True)])
        await assert_violation(stream, 1, "return_features")
