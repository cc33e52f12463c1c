"""Threads without a core: others repeat the work that they have begun, and no bit changes."""

from __future__ import annotations

import os
import threading

import pytest
import torch

from specdec.backends.avx512.tiled_linear import TiledLinear
from tests.specdec.backends.avx512.common_layers import TAKEN, model_of, outputs_of, runner_of, threads_for_passes

MANY = 4 * (os.cpu_count() or 1)
"""More threads than cores: some of them always wait for one."""

pytestmark = pytest.mark.skipif(
    not TiledLinear.takes(torch.zeros(1, 2, dtype=torch.bfloat16)), reason="not on this CPU, or not built"
)


@pytest.mark.parametrize("outputs", [1, 33, 700])
@pytest.mark.parametrize("num_rows", [0, 1, 57, 200])
def test_a_product_has_the_same_bits_by_however_many_threads(num_rows: int, outputs: int) -> None:
    torch.manual_seed(0)
    layer = TiledLinear(torch.randn(outputs, 96).bfloat16(), torch.randn(outputs).bfloat16())
    rows = torch.randn(num_rows, 96).bfloat16()
    expected = layer(rows)
    for threads in (2, 3, MANY):
        for _ in range(10):
            with threads_for_passes(threads):
                assert torch.equal(layer(rows), expected)


@pytest.mark.parametrize("name", ["llama", "tiles that are not full, biases everywhere"])
def test_a_pass_has_the_same_bits_while_other_threads_take_the_cores(name: str) -> None:
    runner = runner_of(model_of(TAKEN[name]))
    _, expected = outputs_of(runner)
    done = threading.Event()

    def take_a_core() -> None:
        numbers = torch.randn(64, 64)
        while not done.is_set():
            numbers @ numbers  # lets go of Python's lock

    thieves = [threading.Thread(target=take_a_core) for _ in range(2)]
    for thief in thieves:
        thief.start()
    try:
        for _ in range(5):
            with threads_for_passes(MANY):
                assert torch.equal(outputs_of(runner)[1], expected)
    finally:
        done.set()
        for thief in thieves:
            thief.join()
