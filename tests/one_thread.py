"""``from tests.one_thread import one_thread`` in a conftest: torch has one thread in the tests of that folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """torch's threads wait by spinning: two of them on a shared core take ten times as long for small tensors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
