"""Every kernel compiles for the GPUs that it is for, and keeps its numbers in registers."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.checkout import ROOT

pytest.importorskip("triton", reason="the extra gpu is not installed")


@pytest.mark.slow
def test_kernels_compile_for_sm_90_without_spilling() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.specdec.backends.cuda.compiled"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    print(done.stdout)
    assert done.returncode == 0, done.stderr
