"""A layer next to a model, in C, gives what its own code gives; others are left alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specdec.backends.avx512.side_layer import FusedSideLayer
from specdec.backends.layer_options import LayerOptions
from specdec.backends.packed_pass import PackedPass
from specdec.backends.side_layer import SideLayer
from specdec.kvcache.block_pool import BlockPool
from specdec.kvcache.store import KvStore
from specdec.passes.rows import PassRows, Segment
from tests.models.backends import CPU, backend
from tests.specdec.backends.avx512.common_layers import IN_C, threads_for_passes

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FEATURES, BLOCK = 4, 2, 32, 80, 96, 8
WIDTH = 2 * HIDDEN
CONFIG: dict[str, Any] = {"num_attention_heads": HEADS, "head_dim": HEAD_DIM, "rope_theta": 5000.0}


class Head(nn.Module):
    def __init__(self, layer: SideLayer) -> None:
        super().__init__()
        self.layer: Any = layer


def linear(inputs: int, outputs: int, bias: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Linear:
    layer = nn.Linear(inputs, outputs, bias=bias)
    nn.init.normal_(layer.weight, 0.0, 1.5 * inputs**-0.5)
    return layer.to(dtype).requires_grad_(False)


def head_of(
    width: int = WIDTH, features: int = FEATURES, bias: bool = False, dtype: torch.dtype = torch.bfloat16, **config: Any
) -> Head:
    torch.manual_seed(1)
    options = LayerOptions.read(CONFIG | config, HIDDEN)
    layer = SideLayer(
        options,
        to_heads=linear(width, (HEADS + 2 * KV_HEADS) * HEAD_DIM, bias, dtype),
        o_proj=linear(HEADS * HEAD_DIM, HIDDEN, bias, dtype),
        norm=(1 + 0.2 * torch.randn(HIDDEN)).to(dtype),
        to_features=linear(HIDDEN, 2 * features, bias, dtype),
        down_proj=linear(features, HIDDEN, bias, dtype),
    )
    return Head(layer)


class Passes:
    """Passes over one pool of 16 blocks."""

    def __init__(self) -> None:
        self._store = KvStore(BlockPool(16, BLOCK), CPU)

    def outputs(self, layer: Any, segments: Sequence[Segment], inputs: Tensor, states: Tensor) -> Tensor:
        rows = PassRows(segments, BLOCK)
        packed_pass = PackedPass(self._store, rows, backend().attention(rows, BLOCK))
        outputs: Tensor = layer(inputs, states, packed_pass, layer=3)
        return outputs


def segment(num_rows: int, num_context: int, first_block: int, parents: Sequence[int] | None = None) -> Segment:
    blocks = range(first_block, first_block + 5)
    parents = range(-1, num_rows - 1) if parents is None else parents
    return Segment([0] * num_rows, parents, num_context, list(blocks), (), exact=False)


def all_outputs(layer: Any) -> list[Tensor]:
    """Of two texts together: their beginnings, some rows more, a tree and a node below it."""
    passes, numbers = Passes(), torch.Generator().manual_seed(2)
    found = []
    for segments in (
        [segment(13, 0, 0), segment(3, 0, 5)],
        [segment(1, 13, 0), segment(2, 3, 5)],
        [segment(4, 14, 0, (-1, -1, 0, 1)), segment(1, 5, 5)],
        [Segment([0], (-1, -1, 0, 1, 3), 14, [0, 1, 2], (), exact=False)],
    ):
        num_rows = sum(len(each.token_ids) for each in segments)
        inputs = torch.randn(num_rows, layer_width(layer), generator=numbers).bfloat16()
        states = (5 * torch.randn(num_rows, HIDDEN, generator=numbers)).bfloat16()
        before = states.clone()
        found.append(passes.outputs(layer, segments, inputs, states))
        assert torch.equal(states, before), "the caller keeps its states"
    return found


def layer_width(layer: Any) -> int:
    inner = layer.layer if isinstance(layer, FusedSideLayer) else layer
    return int(inner.to_heads.in_features)


@IN_C
@torch.inference_mode()
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    "head",
    [{}, {"bias": True}, {"sliding_window": 4}, {"width": HIDDEN}, {"rms_norm_eps": 0.5}],
    ids=["wide", "biases", "window", "as wide as its states", "another norm"],
)
def test_it_gives_what_its_own_code_gives(head: dict[str, Any], threads: int):
    plain = head_of(**head)
    fused = copy.deepcopy(plain)
    backend().pack(fused)
    assert type(fused.layer) is FusedSideLayer
    with threads_for_passes(threads):
        pairs = zip(all_outputs(plain.layer), all_outputs(fused.layer), strict=True)
    for expected, computed in pairs:
        torch.testing.assert_close(computed, expected, atol=0.06, rtol=0.02)


@IN_C
@torch.inference_mode()
def test_a_row_is_the_same_in_any_company():
    head = head_of(bias=True)
    backend().pack(head)
    inputs, states = torch.randn(75, WIDTH).bfloat16(), torch.randn(75, HIDDEN).bfloat16()
    together = Passes().outputs(head.layer, [segment(35, 0, 0), segment(40, 0, 5)], inputs, states)
    alone = Passes()
    rows = [
        alone.outputs(head.layer, [segment(1, row, 0)], inputs[row : row + 1], states[row : row + 1])
        for row in range(35)
    ]
    assert torch.equal(together[:35], torch.cat(rows))


@torch.inference_mode()
@pytest.mark.parametrize(
    "head",
    [{"dtype": torch.float32}, {"hidden_act": "gelu"}, {"features": 80}, {"width": 2 * HIDDEN + 8}],
    ids=str,
)
def test_what_c_does_not_compute_is_left_to_torch(head: dict[str, Any]):
    packed, dtype = head_of(**head), head.get("dtype", torch.bfloat16)
    backend().pack(packed)
    assert type(packed.layer) is SideLayer
    inputs, states = torch.randn(2, layer_width(packed.layer), dtype=dtype), torch.randn(2, HIDDEN, dtype=dtype)
    outputs = Passes().outputs(packed.layer, [segment(2, 0, 0)], inputs, states)
    assert outputs.shape == (2, HIDDEN)
    assert outputs.isfinite().all()
