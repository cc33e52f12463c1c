"""What was compiled from other C files than those that are there is not called."""

from __future__ import annotations

import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from specdec.backends.avx512.kernels import has_avx512_bf16, is_out_of_date, why_not


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """Compiled just now, in a checkout."""
    package = tmp_path / "specdec" / "backends" / "avx512"
    package.mkdir(parents=True)
    (tmp_path / "pyproject.toml").touch()
    for number, name in enumerate(("kernels.h", "pass.c", "_kernels.so")):
        (package / name).touch()
        os.utime(package / name, (number, number))
    return package / "_kernels.so"


@pytest.mark.parametrize("source", ["kernels.h", "pass.c"])
def test_a_library_is_out_of_date_once_a_source_is_newer(library: Path, source: str):
    assert not is_out_of_date(library)
    os.utime(library.parent / source, (3, 3))
    assert is_out_of_date(library)


def test_what_is_installed_is_of_one_piece_whatever_its_times_say(library: Path):
    os.utime(library.parent / "pass.c", (3, 3))
    (library.parents[3] / "pyproject.toml").unlink()
    assert not is_out_of_date(library)


@pytest.mark.skipif(not has_avx512_bf16(and_no_amx=False), reason="this CPU has no use for it")
def test_the_c_files_were_compiled_where_there_is_a_compiler() -> None:
    compiler, *_ = (sysconfig.get_config_var("CC") or "cc").split()
    if shutil.which(compiler) is None:
        pytest.skip(f"there is no {compiler}")
    assert why_not() is None
