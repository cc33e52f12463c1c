"""A file of API keys."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest


def line(name: str, token: str, **quotas: int) -> str:
    return json.dumps({"name": name, "sha256": hashlib.sha256(token.encode()).hexdigest(), **quotas}) + "\n"


def write(file: Path, *lines: str) -> None:
    fresh = file.with_suffix(".new")
    fresh.write_text("".join(lines))
    os.replace(fresh, file)


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    file = tmp_path / "keys.jsonl"
    write(file, "# of the team\n", "\n", line("alice", "a-token", max_sequences=2, tokens_per_minute=60))
    return file
