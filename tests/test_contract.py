"""The contract follows the rules of its style, and does not break those who speak it already."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.checkout import ROOT

BUF = Path(sys.executable).parent / "buf"

pytestmark = pytest.mark.slow


def workspace(directory: Path) -> Path:
    shutil.copytree(ROOT / "protos" / "specdec", directory / "specdec")
    shutil.copy(ROOT / "protos" / "buf.yaml", directory)
    status = Path("google") / "rpc" / "status.proto"
    (directory / status).parent.mkdir(parents=True)
    shutil.copy(str(distribution("googleapis-common-protos").locate_file(str(status))), directory / status)
    return directory


def buf(directory: Path, *arguments: str) -> str:
    run = subprocess.run([BUF, *arguments], cwd=directory, capture_output=True, text=True, timeout=60)
    return run.stdout + run.stderr


def test_the_contract_is_linted(tmp_path: Path) -> None:
    directory = workspace(tmp_path)
    assert buf(directory, "lint") == ""
    common = directory / "specdec" / "v1" / "common.proto"
    common.write_text(common.read_text() + "message bad_name { string Field = 1; }\n")
    assert "bad_name" in buf(directory, "lint"), "a planted mistake is found"


def test_a_change_that_breaks_others_would_be_found(tmp_path: Path) -> None:
    """By hand: ``buf breaking --against`` a checkout of the last release."""
    before, after = workspace(tmp_path / "before"), workspace(tmp_path / "after")
    assert buf(after, "breaking", "--against", str(before)) == ""
    common = after / "specdec" / "v1" / "common.proto"
    common.write_text(common.read_text().replace("uint32 vocab_size = 3;", "uint32 vocab_size = 99;"))
    assert "vocab_size" in buf(after, "breaking", "--against", str(before))
