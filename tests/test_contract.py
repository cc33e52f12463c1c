"""The contract follows the rules of its style, does not break those who speak it already, and is what the code is made
of."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from protos.generate import generate
from tests.checkout import ROOT

BUF = Path(sys.executable).parent / "buf"


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


@pytest.mark.slow
def test_the_contract_is_linted(tmp_path: Path) -> None:
    directory = workspace(tmp_path)
    assert buf(directory, "lint") == ""
    common = directory / "specdec" / "v1" / "common.proto"
    common.write_text(common.read_text() + "message bad_name { string Field = 1; }\n")
    assert "bad_name" in buf(directory, "lint"), "a planted mistake is found"


@pytest.mark.slow
def test_a_change_that_breaks_others_would_be_found(tmp_path: Path) -> None:
    """By hand: ``buf breaking --against`` a checkout of the last release."""
    before, after = workspace(tmp_path / "before"), workspace(tmp_path / "after")
    assert buf(after, "breaking", "--against", str(before)) == ""
    common = after / "specdec" / "v1" / "common.proto"
    common.write_text(common.read_text().replace("uint32 vocab_size = 3;", "uint32 vocab_size = 99;"))
    assert "vocab_size" in buf(after, "breaking", "--against", str(before))


def test_generated_code_is_what_protoc_makes_of_the_contract(tmp_path):
    generate(tmp_path)
    fresh = {str(file.relative_to(tmp_path)): file for file in tmp_path.rglob("*.py*")}
    committed = {
        str(file.relative_to(ROOT)): file
        for file in (ROOT / "specdec" / "v1").glob("*.py*")
        if file.name != "__init__.py"
    }
    assert fresh.keys() == committed.keys()
    assert len(fresh) >= 9, "four contract files make three modules each"
    for name, file in fresh.items():
        assert file.read_bytes() == committed[name].read_bytes(), f"{name} differs: run make protos"


@pytest.mark.parametrize("proto", sorted((ROOT / "protos").rglob("*.proto")), ids=lambda file: file.stem)
def test_every_rpc_says_what_it_does(proto):
    lines = [line.strip() for line in proto.read_text().splitlines()]
    rpcs = [number for number, line in enumerate(lines) if line.startswith("rpc ")]
    assert rpcs or not any(line.startswith("service ") for line in lines)
    for number in rpcs:
        assert lines[number - 1].startswith("//"), f"{proto.name}: {lines[number]} has no comment"


def test_the_contract_lies_where_its_package_says():
    protos = sorted((ROOT / "protos").rglob("*.proto"))
    assert len(protos) == 4
    for file in protos:
        assert file.parent == ROOT / "protos" / "specdec" / "v1"
        assert "\npackage specdec.v1;\n" in file.read_text()
