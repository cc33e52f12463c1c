"""A damped pair small enough for tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bench.models.damped_pair import Pair, Shape, damped_pair

SMALL = Shape(
    vocab_size=512, hidden=128, layers=6, heads=4, kv_heads=2, feed_forward=256, context_length=2048, damping=0.04
)


@pytest.fixture(scope="session")
def small_pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return damped_pair(tmp_path_factory.mktemp("pair"), SMALL)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Contenders set torch's threads; the next test must not notice."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
