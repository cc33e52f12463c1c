"""Certificates of two development CAs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from specdec.security import dev_ca as certificates


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("ours")
    certificates.make(directory)
    return directory


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of another CA."""
    directory = tmp_path_factory.mktemp("theirs")
    certificates.make(directory)
    return directory


@pytest.fixture
def own(ours: Path, tmp_path: Path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(ours, tmp_path / "own"))
